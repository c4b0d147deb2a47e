"""Rows of graphs with shared buffers that take or give more than `rows` knows: those that hub repositories keep for transformers.js.

More is `position_ids`, the number of logits to keep, logits for all tokens of a pass and not of the last one alone, and
recurrent states. A state is of fixed size and changes with every token: it is read from one array and written to
another, and copied back after the pass, because nothing says that a graph has read all of it before it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emberd.binding import Binding, Every
from emberd.rows import Rows

if TYPE_CHECKING:
    from emberd.session import Model


class WideRows(Rows):
    """As `Rows`. What `kv` gives of a row does not hold its states: they cannot serve another prompt."""

    def __init__(self, model: Model, longest: int) -> None:
        """`longest` is the most tokens that one `extend` is given."""
        super().__init__(model, longest)
        rows = model.max_batch + 1
        self._inputs = model.inputs
        self._positions = np.zeros((rows, 1), np.int64)
        self._given = self._logits
        """The logits of one token a row as the graph gives them, `[rows, 1, vocab]`; in `_logits` they are float32."""
        if model.logits_type != "float32":
            self._logits = np.zeros(self._given.shape, np.float32)
        self._every = Every(model.vocab_size, model.logits_type)
        self._tail: NDArray[np.floating] | None = None
        """The logits of all tokens of an `extend`, `[1, tokens, vocab]`, until those of the last have been taken out."""
        self._past = [np.zeros((rows, *state.shape), state.dtype) for state in model.inputs.states]
        self._present = [np.zeros_like(state) for state in self._past]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Runs `tokens` through the model after what the row holds already: one by one where it takes no more after others."""
        count, start = len(tokens), self.length(row)
        if start and count > 1 and not self._model.chunks:
            for token in tokens:
                self.extend(row, [token])
            return
        self._widen(start + count)
        binding = self._extends[row]
        if binding is None:
            binding = self._extends[row] = self._bind(row, row + 1)
        # No wider than it must be: there are graphs that find the positions of a prompt at the mask's end.
        binding.read("attention_mask", self._mask[row : row + 1, : start + count])
        if self._inputs.positions:
            binding.read("position_ids", np.arange(start, start + count)[None])
        if self._model.wide_logits:
            self._tail = self._every.of(count)
            binding.write("logits", self._tail)
        super().extend(row, tokens)
        binding.write("logits", self._given[row : row + 1])  # lets go of what a long prompt took

    def decode(self, count: int) -> None:
        """Runs the next token of each of the rows `0..count`, all in one pass."""
        self._tail = None  # of an `extend` that failed
        self._positions[:count, 0] = self._lengths[:count]
        super().decode(count)

    def move(self, source: int, target: int) -> None:
        """Moves a sequence into another row, which must be empty, and empties its own."""
        for state in self._past:
            state[target] = state[source]
            state[source] = 0
        super().move(source, target)

    def release(self, row: int) -> None:
        """Empties a row and gives its memory back."""
        for state in self._past:
            state[row] = 0
        super().release(row)

    def _bind(self, first: int, end: int, outputs: bool = True) -> Binding:
        binding = super()._bind(first, end, outputs)
        inputs = self._inputs
        if outputs:
            binding.write("logits", self._given[first:end])
        if inputs.positions:
            binding.read("position_ids", self._positions[first:end])
        if inputs.keep is not None:
            name, shape = inputs.keep
            binding.read(name, np.ones(shape, np.int64))
        for state, past, present in zip(inputs.states, self._past, self._present, strict=True):
            binding.read(state.past, past[first:end])
            binding.write(state.present, present[first:end])
        return binding

    def _complete(self, first: int, end: int) -> None:
        if self._tail is not None:
            self._logits[first, 0] = self._tail[0, -1]
            self._tail = None
        elif self._given is not self._logits:
            self._logits[first:end] = self._given[first:end]
        for past, present in zip(self._past, self._present, strict=True):
            past[first:end] = present[first:end]
        super()._complete(first, end)
