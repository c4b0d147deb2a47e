"""Guesses how an answer goes on, with a smaller model that lies beside the large one.

The guesses are checked by the large model in one pass; they change the pace and never the answer (speculative decoding,
https://arxiv.org/abs/2211.17192; what is drawn here is drawn by the request's own seed, so a guess is right when it is that
token). When to guess is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from emberd.engine import EngineError
from emberd.mlx_caches import always_cut, compute
from emberd.mlx_model import Model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from emberd._core import Settings
    from emberd.mlx_model import Caches

FOLDER = "draft"
"""Where the smaller model lies, within the folder of the large one."""

AHEAD = 3
"""Tokens that are guessed where the request leaves it to the engine."""


class Draft:
    """The smaller model, and what it has read of one answer."""

    def __init__(self, model: Model, longest: int) -> None:
        """`longest` is the most tokens that are read in one step."""
        self._model = model
        self._longest = longest
        self._id: int | None = None
        self._caches: Caches = []
        self._known = 0
        """Tokens of prompt and answer in the caches; after them come all guesses but the last."""
        self._guessed: list[int] = []

    def guess(self, id: int, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that may follow `tokens`, those of request `id` so far; none while there is much to read before."""
        if id != self._id:
            self._id, self._caches, self._known, self._guessed = id, self._model.new_caches(), 0, []
        # The last token is read in any case: what follows it is in no cache.
        held = min(self._known + self._agreed(tokens), len(tokens) - 1)
        for cache in self._caches:
            cache.trim(self._known + max(len(self._guessed) - 1, 0) - held)
        self._known, self._guessed = min(held + self._longest, len(tokens)), []
        logits = self._read(mx.array([tokens[held : self._known]]))
        if self._known < len(tokens):
            compute(self._caches)
            return []
        guesses = [mx.argmax(logits, axis=-1)]
        while len(guesses) < count:
            guesses.append(mx.argmax(self._read(guesses[-1][:, None]), axis=-1))
        self._guessed = mx.concatenate(guesses).tolist()
        return list(self._guessed)

    def forget(self) -> None:
        """Frees what was read."""
        self._id, self._caches = None, []

    def _agreed(self, tokens: Sequence[int]) -> int:
        """How many of the guesses that were read are what has come."""
        agreed = 0
        for guess, token in zip(self._guessed[:-1], tokens[self._known :], strict=False):
            if guess != token:
                break
            agreed += 1
        return agreed

    def _read(self, tokens: mx.array) -> mx.array:
        return self._model(tokens, self._caches)[:, -1]


def find(folder: Path, model: Model, settings: Settings, longest: int) -> Draft | None:
    """The draft model in the folder of `model`; `None` where there is none. Raises `EngineError` when it cannot guess for it."""
    path = folder / FOLDER
    if not path.is_dir():
        return None
    small = Model(str(path), settings)
    hint = f"remove {path}, or put another model there"
    if small.vocab_size != model.vocab_size:
        raise EngineError(
            f"the draft model has a vocabulary of {small.vocab_size}, and its model one of {model.vocab_size}", hint
        )
    for each in (small, model):
        if not always_cut(each.new_caches()):
            raise EngineError("a model with recurrent layers or sliding windows can take back no guess", hint)
    return Draft(small, longest)
