"""Runs an imported model folder through onnxruntime, with nothing of emberd's engine in between."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime

if TYPE_CHECKING:
    from numpy.typing import NDArray


Activations = Literal["int16", "float", "int8"]


class Folder:
    """A model folder with a cache for `slots` rows of `capacity` positions each."""

    def __init__(
        self,
        path: Path,
        *,
        slots: int = 1,
        capacity: int = 512,
        threads: int = 2,
        graph: bytes | None = None,
        operators: str = "",
    ) -> None:
        """Load `path`/model.onnx, or `graph` with the weights that lie there; the cache starts empty.

        `operators` is a library of operators that the graph needs.
        """
        options = onnxruntime.SessionOptions()
        if operators:
            options.register_custom_ops_library(operators)
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path))
        self.session = onnxruntime.InferenceSession(
            graph or str(path / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.capacity = capacity
        self.cache: dict[str, NDArray[np.float32]] = {}
        for value in self.session.get_inputs():
            if value.name.startswith("past_key_values."):
                shape = (slots, value.shape[1], capacity, value.shape[3])
                self.cache[value.name.removeprefix("past_key_values.")] = np.zeros(shape, np.float32)

    @classmethod
    def served(cls, path: Path, *, activations: Activations = "int16", capacity: int = 512, threads: int = 2) -> Folder:
        """The folder as emberd opens it: with operators of its own."""
        from emberd import _core  # the other ways work without it

        graph = _core.rewritten((path / "model.onnx").read_bytes(), own=True, activations=activations)
        return cls(path, capacity=capacity, threads=threads, graph=graph, operators=_core.__file__)

    def step(self, ids: NDArray[np.int64], lengths: list[int], first_slot: int = 0) -> dict[str, NDArray[Any]]:
        """Run `ids` (`[rows, tokens]`) in slots from `first_slot` on; `lengths` are those after the step.

        Returns `logits` (`[rows, vocabulary]`), `argmax`, `topk_values` and `topk_indices`.
        """
        rows = slice(first_slot, first_slot + len(ids))
        mask = (np.arange(self.capacity) < np.array(lengths)[:, None]).astype(np.int64)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids, np.int64))
        binding.bind_cpu_input("attention_mask", mask)
        for name, whole in self.cache.items():
            part = whole[rows]
            place = ("cpu", 0, np.float32, part.shape, part.ctypes.data)
            binding.bind_input(f"past_key_values.{name}", *place)
            binding.bind_output(f"present.{name}", *place)
        names = ["logits", "argmax", "topk_values", "topk_indices"]
        for name in names:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        made = binding.get_outputs()[len(self.cache) :]
        results = {name: np.array(value.numpy()) for name, value in zip(names, made, strict=True)}
        results["logits"] = results["logits"][:, 0]
        return results

    def logits(self, ids: list[int], chunks: list[int] | None = None) -> NDArray[np.float32]:
        """Feed `ids` from position 0 on, in pieces of the sizes `chunks` (one by one if `None`).

        Returns the logits after each piece, `[pieces, vocabulary]`.
        """
        made, at = [], 0
        for size in chunks or [1] * len(ids):
            made.append(self.step(np.array([ids[at : at + size]]), [at + size])["logits"][0])
            at += size
        return np.stack(made)

    def greedy(self, prompt: list[int], ends: set[int], limit: int) -> list[int]:
        """Return what follows `prompt` when the likeliest token is taken each time, up to an id of `ends` (kept)."""
        made = [int(self.step(np.array([prompt]), [len(prompt)])["argmax"][0])]
        while len(made) < limit and made[-1] not in ends:
            made.append(int(self.step(np.array([made[-1:]]), [len(prompt) + len(made)])["argmax"][0]))
        return made
