"""The engines that the common suite runs over, and how a test drives one of them through the strict port."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hubgraphs
import tiny
from emberd import loop
from emberd.kv import BLOCK
from fakeport import Admit, FakePort, Launch, Sampling, Settings

if TYPE_CHECKING:
    from emberd.batching import BatchEngine
    from emberd.engine import Fail


def _echo_folder(folder: Path, eos: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"max_position_embeddings": 1024, "vocab_size": tiny.VOCAB, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _mlx_folder(config: str) -> Callable[[Path, list[int]], Path]:
    def build(folder: Path, eos: list[int]) -> Path:
        import tiny_mlx

        return tiny_mlx.build(folder, getattr(tiny_mlx, config), eos=eos)

    return build


def _plain_folder(folder: Path, eos: list[int]) -> Path:
    return tiny.build(folder, eos=eos, heads_in_graph=False)


PLAIN = Settings()


@dataclass(frozen=True)
class Case:
    """One engine of the suite. `long` is a prompt length that takes several prefill steps."""

    name: str
    engine: str
    build: Callable[[Path, list[int]], Path]
    long: int
    folder: Path = Path()

    def run(self, port: FakePort, **settings: int) -> FakePort:
        """Serves `port` with this engine until it is closed, and checks that the contract was kept."""
        loop.run(Launch(self.engine, str(self.folder), Settings(**settings), port))
        assert port.violations == []
        return port

    def single(self, prompt: list[int], max_tokens: int, sampling: Sampling | None = None) -> list[int]:
        """The answer to one request that has the engine to itself."""
        port = self.run(FakePort().at(0, Admit(1, prompt, max_tokens, sampling)))
        assert port.reason is None
        return port.answers[1]

    def singles(self, asked: dict[int, tuple[list[int], int]]) -> dict[int, list[int]]:
        """The answers to requests, by their ids, of which each has the engine to itself while it runs."""
        port = FakePort()
        for place, (id, (tokens, limit)) in enumerate(asked.items()):
            port.at(place * 1000, Admit(id, tokens, limit))
        self.run(port, cache_bytes=0)
        assert port.reason is None
        return port.answers

    def batching(self, fail: Fail, settings: Settings = PLAIN, **given: Any) -> BatchEngine:
        """This engine, where it batches, with what only a test chooses: `prefill_chunk`, `cache_bytes`, `kv_bytes`, `pace`, `costs`."""
        if self.engine == "mlx":
            from emberd.mlx import MlxEngine
            from emberd.mlx_model import Model as MlxModel

            return MlxEngine(MlxModel(str(self.folder), settings), fail, **given)  # type: ignore[arg-type]
        from emberd.onnx import OnnxEngine
        from emberd.session import Model

        return OnnxEngine(Model(str(self.folder), settings), fail, **given)  # type: ignore[arg-type]

    def serve(self, port: FakePort, settings: Settings = PLAIN, **given: Any) -> FakePort:
        """As `run`, with what only a test chooses."""

        def fail(id: int, message: str) -> None:
            port.fail(id, message)

        engine = self.batching(fail, settings, **given)
        try:
            loop.serve(engine, port)
        finally:
            engine.close()
        assert port.violations == []
        return port

    def kv_bytes(self, sequences: int, tokens: int, chunk: int = 32) -> int:
        """A bound under which so many sequences can have so many tokens each, and not one of them a block more.

        `chunk` is the most tokens that are read at once.
        """
        if self.engine == "mlx":
            from emberd.mlx_caches import Sizes
            from emberd.mlx_model import Model as MlxModel

            return sequences * Sizes(MlxModel(str(self.folder), Settings()), chunk).of(tokens)  # type: ignore[arg-type]
        from emberd.budget import KvBudget
        from emberd.session import Model

        model = Model(str(self.folder), Settings())  # type: ignore[arg-type]
        block = KvBudget(model.layers, 0).block_bytes
        return sequences * -(-tokens // BLOCK) * block * (1 if model.shared else 3)

    @property
    def read_again(self) -> int:
        """Tokens at the end of a prompt that are run even where they are kept."""
        return 2 if self.engine == "onnx" else 1

    def with_eos(self, folder: Path, eos: list[int]) -> Case:
        """The same engine on a folder with other eos ids."""
        return replace(self, folder=self.build(folder, eos))


FORMS = {
    "hub-gqa": hubgraphs.Form(attention="gqa", positions="mask", keep="num_logits_to_keep"),
    "hub-gqa-hybrid": hubgraphs.Form(attention="gqa", convolution="pieces"),
    "hub-gqa-half": hubgraphs.Form(attention="gqa", kind="float16", bits="zero points"),
    "concat": hubgraphs.Form(),
    "concat-mask": hubgraphs.Form(positions="mask", keep="num_logits_to_keep", bits="symmetric"),
    "concat-past": hubgraphs.Form(positions="past"),
    "concat-gqa": hubgraphs.Form(attention="gqa-concat"),
    "concat-hybrid": hubgraphs.Form(convolution="pieces", branch=True),
    "concat-half": hubgraphs.Form(cache="float16"),
}
"""Graphs as hub repositories have them."""


def _hub(name: str) -> Case:
    return Case(name, "onnx", lambda folder, eos: hubgraphs.build(folder, FORMS[name], eos=eos, files=2), long=230)


CASES = [
    Case("echo", "echo", _echo_folder, long=900),
    Case("onnx", "onnx", lambda folder, eos: tiny.build(folder, eos=eos), long=230),
    Case("onnx-logits-only", "onnx", _plain_folder, long=230),
    *map(_hub, FORMS),
]
if importlib.util.find_spec("mlx") is not None:
    CASES += [
        Case("mlx", "mlx", _mlx_folder("LLAMA"), long=230),
        Case("mlx-sliding", "mlx", _mlx_folder("SLIDING"), long=230),
        Case("mlx-recurrent", "mlx", _mlx_folder("MAMBA"), long=230),
        Case("mlx-hybrid", "mlx", _mlx_folder("LFM2"), long=230),
    ]


def prompt(seed: int, length: int) -> list[int]:
    """Token ids above the tiny model's eos id, the same for the same seed."""
    return [8 + (seed * 7919 + i * i * 31 + i * 17) % (tiny.VOCAB - 8) for i in range(length)]
