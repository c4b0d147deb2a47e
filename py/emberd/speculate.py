"""Guesses how an answer goes on, from what prompt and answer have said before: prompt lookup, without a draft model.

Where the last tokens have come before, what followed them then is the guess (https://arxiv.org/abs/2304.04487 calls it
inference with reference). A guess costs no pass: one is made for every token, and whether it came true is counted, so
how far guesses can be trusted is known before anything is spent on them. Which of them are checked, and how, is in
`verify`. Nothing here knows rows, passes or time.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
"""The most tokens that are looked up: where these have come before, what followed the last time they did is guessed."""

_FAR = 16
"""Tokens of agreement beyond which more say nothing more."""

_RESUMED = 8
"""Tokens of agreement that are as good as a text that was being repeated and goes on near where it was left."""

_SHIFTS = (0, 1, -1, 2, -2, 3, -3, 4, -4)
"""How far from there, in tokens: an edit may have made it longer or shorter."""

_SEARCHED = 8
"""Tokens after an edit in which that is looked for."""

_USUAL = (0.0, 0.1, 0.3, 0.6, 0.75, 0.9)
"""How often guesses come true, before any have been seen, by the bits of the number of tokens that agreed: 1, 2–3, 4–7, 8–15, 16 and more."""

_LEARNT = 1 / 16
"""What one guess counts for among those of its request."""

_LEARNT_OF_ALL = 1 / 256
"""What one guess counts for among those of all requests, which is where a new request begins."""


class Rates:
    """How often guesses come true, by how many tokens before them agreed with what came before."""

    def __init__(self, others: Rates | None = None) -> None:
        """Begins with what `others` have seen; what is seen here counts for them too, a little."""
        self._others = others
        self._learnt = _LEARNT if others else _LEARNT_OF_ALL
        self._rates: list[float] = list(others._rates if others else _USUAL)

    def chance(self, agreed: int) -> float:
        """The share of guesses after `agreed` tokens of agreement that come true."""
        return self._rates[min(agreed, _FAR).bit_length()]

    def note(self, agreed: int, came_true: bool) -> None:
        """Learns from one guess."""
        kind = min(agreed, _FAR).bit_length()
        self._rates[kind] += (came_true - self._rates[kind]) * self._learnt
        if self._others is not None:
            self._others.note(agreed, came_true)


class Drafter:
    """The text of one request, and the place in it from which it seems to repeat itself. A token costs the same however long the text is."""

    def __init__(self, prompt: list[int], rates: Rates) -> None:
        """`rates` are those of all requests; they learn from this one."""
        self.rates = Rates(rates)
        self.agreed = 0
        """How many tokens before the guessed place are the last ones of the text, as far as that is known; 0 where nothing is guessed."""
        self._text = prompt.copy()
        self._answer = 0
        """Tokens of the answer in it."""
        self._at = 0
        """Where in the text its next token is guessed to stand already, if any tokens agree."""
        self._left: int | None = None
        """Where the next token would stand had the last edit changed one token for one."""
        self._edited = 0
        """Tokens since then."""
        self._ends: dict[tuple[int, ...], int] = {}
        """Where the last occurrence of each run of up to `NGRAM` tokens ends, but for those at the end of the text."""
        for size in range(1, NGRAM + 1):
            runs = zip(*(prompt[start:-1] for start in range(size)), strict=False)
            self._ends.update(zip(runs, range(size, len(prompt)), strict=False))
        self._look_up()

    def follow(self, answer: Sequence[int]) -> None:
        """Reads what is new of the answer."""
        for token in answer[self._answer :]:
            self._add(token)
        self._answer = len(answer)

    def draft(self, count: int) -> list[int]:
        """The next `count` tokens, if the text goes on as it did then; none where nothing is guessed."""
        if not self.agreed:
            return []
        guess = self._text[self._at : self._at + count]
        while len(guess) < count:  # what repeats itself goes round: it is copied from the copy
            guess.append(guess[len(guess) - (len(self._text) - self._at)])
        return guess

    def _add(self, token: int) -> None:
        text, agreed = self._text, self.agreed
        if agreed:
            came_true = text[self._at] == token
            self.rates.note(agreed, came_true)
            self.agreed = agreed + 1 if came_true else 0
            self._at += 1
            if not came_true and agreed >= _RESUMED:
                self._left, self._edited = self._at, 0
        length = len(text)
        for size in range(1, min(NGRAM, length) + 1):
            self._ends[tuple(text[length - size :])] = length
        text.append(token)
        if self.agreed < NGRAM:
            self._look_up()
        if self._left is not None and not self._resume(self._left):
            self._edited += 1
            self._left = self._left + 1 if self._edited < _SEARCHED and self.agreed < _RESUMED else None

    def _resume(self, left: int) -> bool:
        """Whether the last two tokens stand about where the text that was being repeated was left; it then goes on there."""
        text = self._text
        for shift in _SHIFTS:
            at = left + shift
            if self._edited and 2 <= at < len(text) and text[at - 2 : at] == text[-2:]:
                self._at, self.agreed, self._left = at, _RESUMED, None
                return True
        return False

    def _look_up(self) -> None:
        """Finds the last occurrence of the last tokens, as many of them as have come before."""
        text = self._text
        for size in range(min(NGRAM, len(text) - 1), 0, -1):
            at = self._ends.get(tuple(text[-size:]))
            if at is not None:
                self._at = at
                while size < min(at, _FAR) and text[at - 1 - size] == text[-1 - size]:
                    size += 1
                self.agreed = size
                return
        self.agreed = 0
