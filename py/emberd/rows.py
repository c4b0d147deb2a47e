"""The rows of an ONNX batch: the arrays that a forward pass reads and writes, bound once and changed in place.

A row holds one sequence: its keys and values, its mask, its next token and the last logits. There are two passes:
`extend` reads prompt tokens into one row, `decode` advances the first rows by one token each. Nothing is allocated or
bound during either, once a shape has been seen, but for a wider mask (`NARROWEST`): what Python does besides the run
itself is a few array writes. Which request sits in which row, and when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emberd.binding import Binding
from emberd.kv import KvCache
from emberd.sampling import Room, Sampler, highest

if TYPE_CHECKING:
    from emberd.engine import Request
    from emberd.session import Model


NARROWEST = 512
"""Tokens of a row that the mask has room for at first. A pass reads all of it: with room for the 8,192 of the default
model, one over 8 rows takes 0.2 ms more of 32."""


class Checked:
    """What a check reads and writes beside the cache: tokens, and of each of them what `decode` gives of one."""

    def __init__(self, model: Model) -> None:
        size = model.positions
        self.tokens = np.zeros((1, size), np.int64)
        self.argmax = np.zeros(size, np.int64)
        self.values = np.zeros((size, model.candidates), model.logits_type)
        self.indices = np.zeros((size, model.candidates), np.int64)
        self.logits = np.zeros((size, 1, model.vocab_size), model.logits_type)

    def bind(self, binding: Binding, count: int) -> None:
        """Binds the places of the first `count` tokens."""
        binding.read("input_ids", self.tokens[:, :count])
        binding.write("position_logits", self.logits[:count])
        binding.write("position_argmax", self.argmax[:count])
        binding.write("position_topk_values", self.values[:count])
        binding.write("position_topk_indices", self.indices[:count])


class Rows:
    """`model.max_batch` rows and one to spare. A row is empty until `extend`, and again after `release`."""

    def __init__(self, model: Model, longest: int) -> None:
        """`longest` is the most tokens that one `extend` is given."""
        self._model = model
        rows = model.max_batch + 1
        self._kv = KvCache(model.layers, rows if model.shared else 1, model.context_length)
        self._lengths = np.zeros(rows, np.int64)
        self._mask = np.zeros((rows, min(NARROWEST, model.context_length)), np.int64)
        self._next = np.zeros((rows, 1), np.int64)
        self._chunk = np.zeros((1, longest), np.int64)
        self._argmax = np.zeros(rows, np.int64)
        self._values = np.zeros((rows, model.candidates), model.logits_type)
        self._indices = np.zeros((rows, model.candidates), np.int64)
        self._logits = np.zeros((rows, 1, model.vocab_size), model.logits_type)
        self._numbers = np.arange(rows)
        self._room = Room(model.vocab_size)
        self._extends: list[Binding | None] = [None] * rows
        self._decodes: list[Binding | None] = [None] * (rows + 1)
        """By how many rows; like the others made when they are first needed."""
        self._checks: dict[int, Binding] = {}
        self._checked = Checked(model)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Runs `tokens` through the model after what the row holds already."""
        count = len(tokens)
        start = int(self._lengths[row])
        self._chunk[0, :count] = tokens
        self._widen(start + count)
        binding = self._extends[row]
        if binding is None:
            binding = self._extends[row] = self._bind(row, row + 1)
        binding.read("input_ids", self._chunk[:, :count])
        self._mask[row, start : start + count] = 1
        self._lengths[row] = start + count
        binding.run()
        self._complete(row, row + 1)

    def decode(self, count: int) -> None:
        """Runs the next token of each of the rows `0..count`, all in one pass."""
        self._widen(int(self._lengths[:count].max()) + 1)
        binding = self._decodes[count]
        if binding is None:
            binding = self._decodes[count] = self._bind(0, count)
            binding.read("input_ids", self._next[:count])
        self._mask[self._numbers[:count], self._lengths[:count]] = 1
        self._lengths[:count] += 1
        binding.run()
        self._complete(0, count)

    def check(self, row: int, draft: Sequence[int]) -> None:
        """Runs the row's next token and `draft` after it, up to `model.positions` in all: `look` then shows the logits after each.

        All of them are in the row afterwards, until `keep` says which stay.
        """
        start, count = int(self._lengths[row]), 1 + len(draft)
        self._checked.tokens[0, :count] = [self._next[row, 0], *draft]
        self._widen(start + count)
        binding = self._checks.get(row)
        if binding is None:
            binding = self._checks[row] = self._bind(row, row + 1, outputs=False)
        self._checked.bind(binding, count)
        self._mask[row, start : start + count] = 1
        self._lengths[row] = start + count
        binding.run()

    def look(self, row: int, place: int) -> None:
        """Makes the logits after token `place` of the last check, from 0, those of the row."""
        checked = self._checked
        self._argmax[row] = checked.argmax[place]
        self._values[row], self._indices[row] = checked.values[place], checked.indices[place]
        self._logits[row] = checked.logits[place]

    def keep(self, row: int, length: int) -> None:
        """Takes the tokens of a row after the first `length` as not run; their keys and values are overwritten by what comes."""
        self._mask[row, length : self._lengths[row]] = 0
        self._lengths[row] = length

    def greedy(self, count: int) -> list[int]:
        """The likeliest token of each of the rows `0..count` after a pass."""
        tokens: list[int] = self._argmax[:count].tolist()
        return tokens

    def draw(self, row: int, request: Request) -> int:
        """The next token of a request's answer, from the row's logits after a pass. Raises `ValueError` when they are NaN."""
        if request.sampling is None:
            return int(self._argmax[row])
        sampler = request.sampler
        if sampler is None:
            sampler = request.sampler = Sampler(request.sampling, request.prompt, request.held)
        logits = self._logits[row, 0]
        if self._model.candidates:
            values, indices = self._values[row], self._indices[row]
        else:
            values, indices = highest(logits)
        token, logprob = sampler.choose(values, indices, logits, request.made, self._room)
        if logprob is not None:
            request.logprobs.append(logprob)
        return token

    def feed(self, row: int, token: int) -> None:
        """Sets the token that the row reads in the next `decode`."""
        self._next[row, 0] = token

    def feed_greedy(self, count: int) -> None:
        """Lets each of the rows `0..count` read its likeliest token in the next `decode`."""
        self._next[:count, 0] = self._argmax[:count]

    def length(self, row: int) -> int:
        """Tokens in the row."""
        return int(self._lengths[row])

    def lengths(self, count: int) -> list[int]:
        """Tokens in each of the rows `0..count`."""
        lengths: list[int] = self._lengths[:count].tolist()
        return lengths

    def kv(self, row: int) -> list[NDArray[np.floating]]:
        """The keys and values of a row, `[heads, capacity, width]` for each layer, to read and, while it is empty, to write."""
        return self._kv.row(row)

    def resume(self, row: int, length: int) -> None:
        """Takes the first `length` tokens, whose keys and values were written into an empty row, as run."""
        self._widen(length)
        self._mask[row, :length] = 1
        self._lengths[row] = length

    def move(self, source: int, target: int) -> None:
        """Moves a sequence into another row, which must be empty, and empties its own."""
        length = int(self._lengths[source])
        self._kv.move(source, target, length)
        self._mask[target, :length] = 1
        self._lengths[target] = length
        self._next[target] = self._next[source]
        self._mask[source, :length] = 0
        self._lengths[source] = 0

    def release(self, row: int) -> None:
        """Empties a row and gives its memory back."""
        self._mask[row, : self._lengths[row]] = 0
        self._lengths[row] = 0
        self._kv.release(row)
        if self._mask.shape[1] > NARROWEST and not self._lengths.any():
            self._lay_out(NARROWEST)

    def _widen(self, length: int) -> None:
        """Sees to it that the mask has room for so many tokens of a row."""
        width = self._mask.shape[1]
        if length > width:
            while width < length:
                width *= 2
            self._lay_out(min(width, self._model.context_length))

    def _lay_out(self, width: int) -> None:
        """Gives the mask another width. What is bound to the old one is bound anew when it is needed: 1 ms each."""
        old = self._mask
        self._mask = np.zeros((len(old), width), np.int64)
        both = min(width, old.shape[1])
        self._mask[:, :both] = old[:, :both]
        self._extends = [None] * len(old)
        self._decodes = [None] * (len(old) + 1)
        self._checks.clear()

    def _bind(self, first: int, end: int, outputs: bool = True) -> Binding:
        """Everything but `input_ids`, bound to the rows `first..end`; without `outputs` no more of these than the cache."""
        model = self._model
        binding = Binding(model.session)
        binding.read("attention_mask", self._mask[first:end])
        for layer, rows in zip(model.layers, self._kv.rows(first, end), strict=True):
            binding.read(layer.past, rows)
            binding.write(layer.present, rows)
        if not outputs:
            return binding
        # The graph makes all of these whether they are bound or not. Bound, they are written here once and not copied.
        binding.write("logits", self._logits[first:end])
        if model.has_argmax:
            binding.write("argmax", self._argmax[first:end])
        if model.candidates:
            binding.write("topk_values", self._values[first:end])
            binding.write("topk_indices", self._indices[first:end])
        return binding

    def _complete(self, first: int, end: int) -> None:
        """Makes the argmax that the graph does not make."""
        if not self._model.has_argmax:
            self._argmax[first:end] = self._logits[first:end, 0].argmax(axis=-1)
