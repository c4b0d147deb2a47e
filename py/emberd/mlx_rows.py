"""The rows of the engine over MLX: prompts, each in caches of its own, and the batch of the answers that run.

The running answers are in the rows `0..n`, in the order in which they came. A prompt that is being read has a row of its own
from `max_batch` on; once it is read, it joins the batch. Which request sits in which row, and when, is decided elsewhere; how
the answers share a pass is in `mlx_batch`.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from emberd.mlx_batch import Batch
from emberd.mlx_caches import compute, compute_after
from emberd.sampling import Room, Sampler, highest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from emberd.engine import Request
    from emberd.mlx_model import Caches, Model


class _Prompt:
    """A prompt that is being read."""

    __slots__ = ("caches", "length", "logits", "token")

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.length = 0
        """Tokens in them."""
        self.logits: mx.array | None = None
        """Those after the last token, `[1, vocab]`, once it has been read."""
        self.token = 0
        """The one that is read next."""


class MlxRows:
    """As `parts.Rows`. Of the running answers only one that has no others beside it can be extended or checked."""

    def __init__(self, model: Model) -> None:
        self.ahead = False
        """Whether the next `decode` may start the pass after it, before the tokens that one reads are known here."""
        self._model = model
        self._batch = Batch(model)
        self._prompts: dict[int, _Prompt] = {}
        self._tokens: list[int] = []
        """The likeliest after the last pass over the batch: of each row, or after each token of a check."""
        self._looked: int | None = None
        """The token of a check that the only row's logits are those after."""
        self._room = Room(model.vocab_size)

    @property
    def under_way(self) -> bool:
        """Whether the next pass over the batch has been started: its tokens are in the rows already."""
        return self._batch.under_way

    # Prompts.

    def new(self) -> int:
        """An empty row for a prompt."""
        row = next(row for row in count(self._model.max_batch) if row not in self._prompts)
        self._prompts[row] = _Prompt(self._model.new_caches())
        return row

    def fill(self, row: int, caches: Caches, length: int) -> None:
        """Gives an empty row caches that hold so many tokens; they are the row's from now on."""
        prompt = self._prompts[row]
        prompt.caches, prompt.length = caches, length

    def read(self, row: int, tokens: Sequence[int]) -> None:
        """Runs tokens of a prompt whose logits nobody needs. Raises `ValueError` for one that the model does not have."""
        # MLX reads whatever lies behind the embedding.
        if (beyond := max(tokens)) >= self._model.vocab_size:
            raise ValueError(f"token id {beyond} is beyond the vocabulary of {self._model.vocab_size}")
        prompt = self._prompts[row]
        self._model(mx.array([tokens]), prompt.caches)
        compute(prompt.caches)
        prompt.length += len(tokens)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Runs `tokens` after what the row holds: its next ones, for a running answer. `draw` chooses the one after them."""
        if (prompt := self._prompts.get(row)) is None:
            self.check(row, tokens[1:])
            self._looked = len(tokens) - 1
            return
        if len(tokens) > 1:
            self.read(row, tokens[:-1])
        if tokens[-1] >= self._model.vocab_size:
            raise ValueError(f"token id {tokens[-1]} is beyond the vocabulary of {self._model.vocab_size}")
        prompt.logits = self._model(mx.array([tokens[-1:]]), prompt.caches)[:, -1]
        compute_after(prompt.logits, prompt.caches)
        prompt.length += 1

    def join(self, row: int) -> None:
        """Puts the prompt of a row behind the last of the running answers."""
        prompt = self._prompts.pop(row)
        self._batch.join(prompt.caches, prompt.length, prompt.token)

    # Answers.

    def decode(self, count: int) -> None:
        """Runs the next token of each of the rows `0..count`, which are all of the batch; waits for the likeliest tokens after them."""
        assert count == len(self._batch)
        self._looked = None
        self._tokens = self._batch.step(self.ahead)

    def check(self, row: int, draft: Sequence[int]) -> None:
        """Runs the only row's next token and `draft` after it: `look` then shows the logits after each."""
        assert row == 0 and len(self._batch) == 1
        self._tokens = self._batch.check(draft)
        self._looked = 0

    def look(self, row: int, place: int) -> None:
        """Makes the logits after token `place` of the last check, from 0, those of the row."""
        self._looked = place

    def keep(self, row: int, length: int) -> None:
        """Takes the tokens of the only row after the first `length` as not run."""
        self._batch.cut(self._batch.length(row) - length)

    def greedy(self, count: int) -> list[int]:
        """The likeliest token of each of the rows `0..count` after a pass."""
        return self._tokens[:count]

    def feed_greedy(self, count: int) -> None:
        """Nothing: the batch goes on with the likeliest tokens where nobody says otherwise."""

    def leave(self, rows: list[int]) -> None:
        """Ends these running answers; those behind them move up."""
        self._batch.leave(rows)

    # Either.

    def draw(self, row: int, request: Request) -> int:
        """The next token of a request's answer, from the row's logits after a pass. Raises `ValueError` when they are NaN."""
        prompt = self._prompts.get(row)
        place = row if self._looked is None else self._looked
        if request.sampling is None:
            return self._tokens[place] if prompt is None else int(mx.argmax(_logits(prompt), axis=-1).tolist()[0])
        logits = self._batch.logits(place) if prompt is None else np.array(_logits(prompt)[0].astype(mx.float32))
        return self._choose(logits, request)

    def feed(self, row: int, token: int) -> None:
        """Sets the token that the row reads next."""
        if (prompt := self._prompts.get(row)) is None:
            self._batch.feed(row, token)
        else:
            prompt.token = token

    def length(self, row: int) -> int:
        """Tokens in the row."""
        prompt = self._prompts.get(row)
        return self._batch.length(row) if prompt is None else prompt.length

    def lengths(self, count: int) -> list[int]:
        """Tokens in each of the rows `0..count`, which are of the batch."""
        return [self._batch.length(row) for row in range(count)]

    def kv(self, row: int) -> Caches:
        """What a row holds. Of a prompt it is what the row goes on with: copy it to keep it."""
        prompt = self._prompts.get(row)
        return self._batch.copy(row) if prompt is None else prompt.caches

    def release(self, row: int) -> None:
        """Empties a row and gives its memory back."""
        if self._prompts.pop(row, None) is None:
            self.leave([row])

    def close(self) -> None:
        """Empties all rows."""
        self._prompts.clear()
        self._batch.close()

    def _choose(self, logits: NDArray[np.float32], request: Request) -> int:
        assert request.sampling is not None
        sampler = request.sampler
        if sampler is None:
            sampler = request.sampler = Sampler(request.sampling, request.prompt, request.held)
        values, indices = highest(logits)
        token, logprob = sampler.choose(values, indices, logits, request.made, self._room)
        if logprob is not None:
            request.logprobs.append(logprob)
        return token


def _logits(prompt: _Prompt) -> mx.array:
    assert prompt.logits is not None
    return prompt.logits
