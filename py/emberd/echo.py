"""An engine without a model: it answers with the prompt's own ids, again and again, up to an eos id or the limit.

It keeps every rule of the port — batches, prefill in chunks, limits, cancellation — so that what surrounds an engine
can be tested through the real boundary on a machine that has no model. It is deterministic: sampling changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberd._core import Capabilities
from emberd.engine import EngineError, Fail, Request, Step, at_least_one, eos_ids, is_admit, is_cancel

if TYPE_CHECKING:
    from emberd._core import Settings
    from emberd.engine import Order

PREFILL_CHUNK = 256
"""Prompt tokens a sequence reads in one step: a longer prompt takes several, as with a model."""


class EchoEngine:
    """The requests in flight, all advanced by one id a step."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._eos = frozenset(capabilities.eos_ids)
        self._requests: dict[int, Request] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._requests)

    def take(self, order: Order) -> None:
        """Adds a request, or forgets one."""
        if is_admit(order):
            self._requests[order.id] = Request(order)
        elif is_cancel(order):
            self.drop([order.id])

    def step(self) -> list[Step]:
        """One id for every request past its prefill; one chunk of prompt for the others."""
        steps: list[Step] = []
        for request in list(self._requests.values()):
            length = len(request.prompt)
            if request.done < length:
                request.done = min(length, request.done + PREFILL_CHUNK)
                if request.done < length:
                    continue
            token = request.prompt[request.made % length]
            finish = request.finish(token, self._eos)
            steps.append((request.id, [token], finish))
            if finish is not None:
                del self._requests[request.id]
        return steps

    def drop(self, gone: Iterable[int]) -> None:
        """Forgets requests."""
        for each in gone:
            self._requests.pop(each, None)

    def close(self) -> None:
        """Forgets everything."""
        self._requests.clear()


def load(folder: str, settings: Settings, fail: Fail) -> EchoEngine:
    """An echo with the context length, vocabulary and eos ids of the folder's config files, where it has them.

    An empty `folder` is none at all.
    """
    del fail  # nothing here can fail for one request alone
    config: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    if folder:
        path = Path(folder)
        if not path.is_dir():
            raise EngineError(f"there is no folder {folder}", "give the path of a model folder, or none for echo")
        config, generation = _read(path / "config.json"), _read(path / "generation_config.json")
    context = int(config.get("max_position_embeddings", 8192))
    return EchoEngine(
        Capabilities(
            context_length=min(context, at_least_one("context_length", settings.context_length, context)),
            max_batch=at_least_one("max_batch", settings.max_batch, 16),
            vocab_size=int(config.get("vocab_size", 2**31 - 1)),
            eos_ids=eos_ids(generation, config),
        )
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise EngineError(f"{path} is not JSON: {error}", "fetch the model again") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path} holds no JSON object", "fetch the model again")
    return value
