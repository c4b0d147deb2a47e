"""Rows of graphs with concatenated caches: the present of a pass is a new tensor, longer than the past by what was run.

A prompt is read alone, unpadded. Sequences that decode together are *packed*: their caches lie in one tensor a layer,
each padded on the left to the longest, with a mask and positions that leave the padding out. A pack has two sets of
buffers; a pass reads one and writes the other, so nothing is copied between steps but by the graph itself. When
sequences join or leave, the packs that this touches are put together anew, at the cost of one more copy. Sequences of
very different lengths are in different packs, which bounds the padding by the tokens in use. Graphs that take no
padding get one pack a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emberd.binding import Binding, Every
from emberd.kv import BLOCK
from emberd.rows import Rows
from emberd.wide import WideRows

if TYPE_CHECKING:
    from emberd.layout import Inputs
    from emberd.session import Model

    Arrays = list[NDArray[np.floating]]

SLACK = 256
"""Tokens by which the lengths in a pack may differ whatever they are; beyond, the longest is less than twice the shortest.

A pass reads all weights, of a four-bit model of 135 million parameters as many bytes as the caches of 1,900 tokens; with
a row or two, padding by fewer than 256 tokens costs less than a pass of their own."""


class _Sequence:
    """The caches of one sequence: its own, or its part of a pack's."""

    __slots__ = ("own", "pack", "slot", "states")

    def __init__(self, own: Arrays, states: Arrays) -> None:
        self.own = own
        """Keys and values `[1, heads, length, width]` a layer; empty where they are in a pack."""
        self.states = states
        """Recurrent states `[1, …]`; empty where they are in a pack."""
        self.pack: _Pack | None = None
        self.slot = 0
        """The row of the pack."""

    def caches(self) -> Arrays:
        """Keys and values, `[heads, length, width]` a layer, as views."""
        return [array[0] for array in self.own] if self.pack is None else self.pack.caches(self.slot)

    def recurrent(self) -> Arrays:
        """Recurrent states, as views."""
        return [state[0] for state in self.states] if self.pack is None else self.pack.recurrent(self.slot)


class _Pack:
    """Sequences that decode in one pass."""

    def __init__(self, model: Model, members: list[_Sequence], lengths: list[int]) -> None:
        """Takes the caches of `members`, which hold `lengths` tokens, over."""
        inputs = model.inputs
        self._inputs = inputs
        self.members = members
        self.live = len(members)
        """How many of them are still wanted."""
        self.rows: list[int] = []
        """The row that each is in."""
        self.width = width = max(lengths)
        """Places that the caches have in use, padding included."""
        self.pads = width - np.array(lengths)
        self._past = _Buffers(inputs, len(members))
        self._present = _Buffers(inputs, len(members))
        self._tokens = np.zeros((len(members), 1), np.int64)
        self.logits = np.zeros((len(members), 1, model.vocab_size), model.logits_type)
        """Of the last pass, `[members, 1, vocab]`."""
        self._binding = Binding(model.session)
        self._binding.read("input_ids", self._tokens)
        self._binding.write("logits", self.logits)
        tensors = self._past.of(width)
        for slot, member in enumerate(members):
            pad = self.pads[slot]
            for target, cache in zip(tensors, member.caches(), strict=True):
                target[slot, :, :pad] = 0  # of no weight, but it must be numbers
                target[slot, :, pad:] = cache
            for target, state in zip(self._past.states, member.recurrent(), strict=True):
                target[slot] = state
            member.pack, member.slot, member.own, member.states = self, slot, [], []

    def caches(self, slot: int) -> Arrays:
        """The keys and values of one member, `[heads, length, width]` a layer, as views."""
        return [tensor[slot, :, self.pads[slot] :] for tensor in self._past.of(self.width)]

    def recurrent(self, slot: int) -> Arrays:
        """The states of one member, as views."""
        return [state[slot] for state in self._past.states]

    def run(self, tokens: NDArray[np.int64]) -> None:
        """Runs one more token `[members, 1]` of each member."""
        binding, inputs = self._binding, self._inputs
        self._tokens[:] = tokens
        for name, value in inputs.beside(self.width, 1, self.pads).items():
            binding.read(name, value)
        past, present = self._past.of(self.width), self._present.of(self.width + 1)
        for layer, before, after in zip(inputs.layers, past, present, strict=True):
            binding.read(layer.past, before)
            binding.write(layer.present, after)
        for state, before, after in zip(inputs.states, self._past.states, self._present.states, strict=True):
            binding.read(state.past, before)
            binding.write(state.present, after)
        binding.run()
        self._past, self._present = self._present, self._past
        self.width += 1


class _Buffers:
    """One set of a pack's caches: memory for some blocks of tokens, of which any width can be seen as one tensor."""

    def __init__(self, inputs: Inputs, rows: int) -> None:
        self._inputs = inputs
        self._rows = rows
        self._capacity = 0
        self._memory: Arrays = []
        self.states: Arrays = [np.zeros((rows, *state.shape), state.dtype) for state in inputs.states]
        """Recurrent states, `[rows, …]`."""

    def of(self, width: int) -> Arrays:
        """The tensors `[rows, heads, width, head width]`, whose content is lost when `width` is beyond all before."""
        if width > self._capacity:
            self._capacity = (width * 5 // 4 // BLOCK + 1) * BLOCK  # memory that is not written to takes no room
            self._memory = [
                np.empty(self._rows * layer.heads * self._capacity * layer.width, layer.dtype)
                for layer in self._inputs.layers
            ]
        tensors: Arrays = []
        for layer, memory in zip(self._inputs.layers, self._memory, strict=True):
            shape = (self._rows, layer.heads, width, layer.width)
            tensors.append(memory[: self._rows * layer.heads * width * layer.width].reshape(shape))
        return tensors


class ConcatRows(Rows):
    """As `Rows`. What `kv` gives of a row does not hold its recurrent states: they cannot serve another prompt.

    Of the shared buffers there is one row, into which keys and values of an earlier prompt are written before `resume`
    takes them.
    """

    def __init__(self, model: Model, longest: int) -> None:
        """`longest` is the most tokens that one `extend` is given."""
        super().__init__(model, longest)
        self._inputs = model.inputs
        self._sequences = [self._empty() for _ in range(model.max_batch + 1)]
        self._packs: list[_Pack] = []
        self._packed: list[_Sequence] = []
        """The sequences that the packs were made for, in the order of their rows."""
        self._logits = np.zeros((model.max_batch + 1, 1, model.vocab_size), np.float32)
        self._every = Every(model.vocab_size, model.logits_type)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Runs `tokens` through the model after what the row holds already: one by one where it takes no more after others."""
        model, inputs = self._model, self._inputs
        count, start = len(tokens), self.length(row)
        if start and count > 1 and not model.chunks:
            for token in tokens:
                self.extend(row, [token])
            return
        sequence = self._alone(row)
        self._chunk[0, :count] = tokens
        binding = Binding(model.session)
        binding.read("input_ids", self._chunk[:, :count])
        for name, value in inputs.beside(start, count, np.zeros(1, np.int64)).items():
            binding.read(name, value)
        own: Arrays = []
        for layer, past in zip(inputs.layers, sequence.own, strict=True):
            own.append(np.empty((1, layer.heads, start + count, layer.width), layer.dtype))
            binding.read(layer.past, past)
            binding.write(layer.present, own[-1])
        states: Arrays = []
        for state, before in zip(inputs.states, sequence.states, strict=True):
            states.append(np.empty_like(before))
            binding.read(state.past, before)
            binding.write(state.present, states[-1])
        logits = self._every.of(count if model.wide_logits else 1)
        binding.write("logits", logits)
        binding.run()
        self._logits[row, 0] = logits[0, -1]
        self._sequences[row] = _Sequence(own, states)
        self._lengths[row] = start + count
        self._complete(row, row + 1)

    def decode(self, count: int) -> None:
        """Runs the next token of each of the rows `0..count`, in one pass where padding allows it."""
        if self._sequences[:count] != self._packed:
            self._pack(count)
        for pack in self._packs:
            pack.run(self._next[pack.rows])
            self._logits[pack.rows] = pack.logits
        self._lengths[:count] += 1
        self._complete(0, count)

    def kv(self, row: int) -> list[NDArray[np.floating]]:
        """The keys and values of a row, `[heads, capacity, width]` for each layer, to read and, while it is empty, to write."""
        if not self._lengths[row]:
            return self._kv.row(0)
        return self._sequences[row].caches()

    def resume(self, row: int, length: int) -> None:
        """Takes the first `length` tokens, whose keys and values were written into an empty row, as run."""
        self._sequences[row] = self._empty([array[None, :, :length].copy() for array in self._kv.row(0)])
        self._kv.release(0)
        self._lengths[row] = length

    def move(self, source: int, target: int) -> None:
        """Moves a sequence into another row, which must be empty, and empties its own."""
        self._sequences[target], self._lengths[target] = self._sequences[source], self._lengths[source]
        self._next[target] = self._next[source]
        self._sequences[source], self._lengths[source] = self._empty(), 0

    def release(self, row: int) -> None:
        """Empties a row and gives its memory back, that in a pack when the pack is made anew, or its last sequence leaves."""
        left = self._sequences[row]
        pack, left.pack = left.pack, None  # each holds the other: without this the caches would wait for the collector
        self._sequences[row], self._lengths[row] = self._empty(), 0
        if pack is not None:
            pack.live -= 1
            if not pack.live and pack in self._packs:
                self._packs.remove(pack)
                self._packed = []  # those in other packs may be in other rows from now on

    def _empty(self, own: Arrays | None = None) -> _Sequence:
        if own is None:
            own = [np.zeros((1, each.heads, 0, each.width), each.dtype) for each in self._inputs.layers]
        return _Sequence(own, [np.zeros((1, *each.shape), each.dtype) for each in self._inputs.states])

    def _alone(self, row: int) -> _Sequence:
        """The sequence of a row with caches of its own."""
        sequence = self._sequences[row]
        if sequence.pack is None:
            return sequence
        own = [array[None].copy() for array in sequence.caches()]
        alone = _Sequence(own, [state[None].copy() for state in sequence.recurrent()])
        length = self._lengths[row]
        self.release(row)
        self._sequences[row], self._lengths[row] = alone, length
        return alone

    def _pack(self, count: int) -> None:
        """Puts the rows `0..count` into packs; a pack with the sequences that it had stays as it is."""
        before = {tuple(map(id, pack.members)): pack for pack in self._packs}
        self._packs, self._packed = [], self._sequences[:count]
        lengths = self._lengths[:count].tolist()
        for rows in _groups(lengths, self._model.padding):
            members = [self._sequences[row] for row in rows]
            pack = before.pop(tuple(map(id, members)), None)
            if pack is None:
                pack = _Pack(self._model, members, [lengths[row] for row in rows])
            pack.rows = rows
            self._packs.append(pack)


def _groups(lengths: list[int], padding: bool) -> list[list[int]]:
    """Which rows decode together: none, or those of like lengths; longest first, and of equal lengths the lower row first."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and padding and (2 * lengths[row] > longest or longest - lengths[row] <= SLACK):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def rows_of(model: Model, longest: int) -> Rows:
    """The rows for the layout that the model's graph has; `longest` is the most tokens of one pass."""
    if not model.shared:
        return ConcatRows(model, longest)
    return Rows(model, longest) if model.inputs.plain() and not model.wide_logits else WideRows(model, longest)
