"""A forward pass of onnxruntime with its inputs and outputs bound to NumPy arrays, which are read and written in place."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray


class Binding:
    """A session with all inputs and outputs bound to arrays; keeps the arrays alive."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._values: dict[str, ort.OrtValue] = {}
        self._written: dict[str, None] = {}
        """The outputs in the order in which they were first bound, which is that of onnxruntime's list."""

    def read(self, name: str, array: NDArray[np.generic]) -> None:
        """Binds an input; `array` must be contiguous, and is read in place."""
        value = self._values[name] = ort.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_input(name, value)

    def write(self, name: str, array: NDArray[np.generic]) -> None:
        """Binds an output; `array` must be contiguous, and is written in place."""
        value = self._values[name] = ort.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_output(name, value)
        self._written[name] = None

    def run(self) -> None:
        """Runs the pass."""
        self._session.run_with_iobinding(self._binding)

    def run_and_read(self, name: str) -> NDArray[np.generic]:
        """Runs the pass and returns an output that is bound to no array, since its shape is not known before (a copy)."""
        self._binding.bind_output(name)
        self.run()
        place = [*self._written, name].index(name)
        array: NDArray[np.generic] = self._binding.get_outputs()[place].numpy()
        return array


class Every:
    """Memory for the logits of all tokens of a pass, of which only the last one's are wanted."""

    _KEPT = 256
    """Tokens. Fresh memory costs 2 % of a pass over a chunk of a prompt; that of a whole prompt is too much to keep."""

    def __init__(self, vocab_size: int, dtype: str) -> None:
        self._logits = np.zeros((1, 0, vocab_size), dtype)

    def of(self, count: int) -> NDArray[np.floating]:
        """An array `[1, count, vocab]`."""
        _, size, vocab = self._logits.shape
        if count > size:
            fresh = np.empty((1, count, vocab), self._logits.dtype)
            if count > self._KEPT:
                return fresh
            self._logits = fresh
        return self._logits[:, :count]
