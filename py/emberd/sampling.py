"""Chooses one token from one row of logits: temperature, top-k, top-p and min-p, exactly, with a seed for each request.

The graph hands over its highest logits (256 of them, sorted), which is nearly always enough; the full row is read
only where exact probabilities need it: for the mass of a nucleus, and for filters that reach further. What changes
logits before (penalties, biases) is in `adjust`. Order of the filters: temperature, top-k, top-p over what top-k left
(https://arxiv.org/abs/1904.09751), min-p (https://arxiv.org/abs/2407.01082), as Hugging Face applies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emberd.adjust import Adjustments

if TYPE_CHECKING:
    from emberd._core import Sampling
    from emberd.constrain import Held
    from emberd.engine import Logprob

_MASK = 2**64 - 1
_LOWEST_TEMPERATURE = 1e-6
"""Below this the quotient of logit and temperature leaves the range of a float32; the draw is greedy long before."""

CANDIDATES = 256
"""How many of the highest logits are sorted here for a graph that does not sort them itself."""

LOWEST_LOGPROB = -9999.0
"""What is told of a token that cannot come: JSON has no infinity, and this is what OpenAI's API says in its place."""


class Room:
    """Arrays to work in, `[vocab]` each: fresh memory for each draw costs as much again as the work."""

    def __init__(self, vocab_size: int) -> None:
        self.weights = np.zeros(vocab_size, np.float32)
        self.adjusted = np.zeros(vocab_size, np.float32)
        self.masked = np.zeros(vocab_size, np.float32)
        self.barred = np.zeros((-(-vocab_size // 32) * 4, 8), np.float32)


class Sampler:
    """How one request's tokens are chosen, with what its answer has said so far."""

    def __init__(self, sampling: Sampling, prompt: list[int], held: Held | None = None) -> None:
        self._sampling = sampling
        self._held = held
        self._top = sampling.top_logprobs
        self._adjustments = Adjustments.of(sampling, prompt)

    def choose(
        self, values: NDArray[np.floating], ids: NDArray[np.int64], logits: NDArray[np.floating], n: int, room: Room
    ) -> tuple[int, Logprob | None]:
        """The `n`-th token of the answer, and its log probability if that was asked for.

        `values` `[candidates]` are the highest logits in descending order, of equal ones the lower id first, and `ids`
        their token ids; `logits` `[vocab]` is the full row they come from. Each token is chosen once, in order. Raises
        `ValueError` when the logits are not numbers, and when the constraint cannot go on.
        """
        sampling, highest_values, highest_ids, row = self._sampling, values, ids, logits
        if self._adjustments is not None and np.isfinite(values[0]):
            row = self._adjustments.apply(logits, room.adjusted)
            highest_values, highest_ids = self._adjustments.highest(values, ids, row)
            if not len(highest_ids):
                highest_values, highest_ids = highest(row)
        u = uniform(sampling.seed, n) if sampling.temperature else 0.0
        if self._held is None:
            token = draw(highest_values, highest_ids, row, sampling, u, room.weights)
        else:
            token = self._held.draw(highest_values, highest_ids, row, sampling, u, room)
        self.take(token)
        if self._top is None:
            return token, None
        return token, logprob(values, ids, logits, token, self._top, room.weights)

    def take(self, token: int) -> None:
        """Counts a token as the next of the answer, whoever chose it. Raises `ValueError` when the constraint refuses it."""
        if self._held is not None:
            self._held.accept(token)
        if self._adjustments is not None:
            self._adjustments.count(token)


def uniform(seed: int, n: int) -> float:
    """The `n`-th uniform number in [0, 1) of a seed, with 53 bits: SplitMix64 (Steele, Lea and Flood, 2014).

    A counter-based generator has no state, so a request's numbers depend on nothing but its seed and how far its answer
    has come: not on the batch, and not on what was drawn before and thrown away. Costs 0.5 µs.
    """
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def highest(logits: NDArray[np.floating], count: int = CANDIDATES) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """The highest logits in descending order, of equal ones the lower id first, and their token ids."""
    ids = _best(logits, min(count, len(logits)))
    return logits[ids], ids


def logprob(
    values: NDArray[np.floating],
    ids: NDArray[np.int64],
    logits: NDArray[np.floating],
    token: int,
    top: int,
    scratch: NDArray[np.float32] | None = None,
) -> Logprob:
    """The natural logarithm of a token's probability under the softmax of the full row, and the `top` likeliest tokens.

    Arrays as for `draw`; more than `len(values)` likeliest tokens are not given. Raises `ValueError` when the logits
    are not numbers.
    """
    best = float(values[0])
    weights = np.subtract(logits, np.float32(best), out=scratch, dtype=np.float32)
    norm = best + float(np.log(np.exp(weights, out=weights).sum(dtype=np.float64)))
    if not np.isfinite(norm):
        raise ValueError(f"the logits sum to {norm}")

    def of(logit: float) -> float:
        return min(max(logit - norm, LOWEST_LOGPROB), 0.0)

    likeliest = zip(ids[:top].tolist(), values[:top].tolist(), strict=True)
    return of(float(logits[token])), [(id, of(logit)) for id, logit in likeliest]


def draw(
    values: NDArray[np.floating],
    ids: NDArray[np.int64],
    logits: NDArray[np.floating],
    sampling: Sampling,
    u: float,
    scratch: NDArray[np.float32] | None = None,
) -> int:
    """The token id that the uniform number `u` falls on; the best one where the temperature is 0.

    `values` `[candidates]` are the highest logits in descending order and `ids` their token ids; `logits` `[vocab]` is
    the full row they come from. `scratch` `[vocab]` is room to work in. Raises `ValueError` when the logits are not
    numbers.
    """
    best = float(values[0])
    if not np.isfinite(best):
        raise ValueError(f"the highest logit is {best}")
    if sampling.temperature == 0:
        return int(ids[0])
    temperature = max(sampling.temperature, _LOWEST_TEMPERATURE)
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    known, vocab = len(values), len(logits)
    if top_k >= vocab:
        top_k = 0
    if known < top_k:
        return _draw_wide(logits, temperature, top_k, top_p, min_p, u)
    kept = values[:top_k] if top_k else values
    weights = np.exp((kept.astype(np.float64) - best) / temperature)
    cumulative = np.cumsum(weights)
    inside = float(cumulative[-1])
    if top_k or known == vocab:
        return int(ids[_pick(weights, cumulative, inside, top_p, min_p, u)])
    if top_p == 1.0 and weights[-1] < min_p:
        # The candidates hold all that min-p keeps, and nothing needs to be known of the others.
        return int(ids[_pick(weights, cumulative, inside, top_p, min_p, u)])
    others = _others(ids, logits, best, temperature, scratch)
    tail = float(others.sum())
    total = inside + tail
    if not np.isfinite(total):
        raise ValueError(f"the logits sum to {total}")
    if top_p < 1.0 or min_p > 0.0:
        index = _pick(weights, cumulative, total, top_p, min_p, u, known)
        return int(ids[index]) if index < known else _draw_wide(logits, temperature, 0, top_p, min_p, u, total)
    target = u * total
    if target < inside or tail == 0.0:
        return int(ids[min(int(np.searchsorted(cumulative, target, side="right")), known - 1)])
    beyond = np.cumsum(others, dtype=np.float64)
    index = int(np.searchsorted(beyond, target - inside, side="right"))
    return index if index < len(beyond) else int(np.flatnonzero(others)[-1])


def _pick(
    weights: NDArray[np.float64],
    cumulative: NDArray[np.float64],
    total: float,
    top_p: float,
    min_p: float,
    u: float,
    beyond: int | None = None,
) -> int:
    """The index that `u` falls on among the tokens that top-p and min-p keep.

    `weights` are in descending order, as shares of the highest, and `cumulative` their sums; `total` is the mass of
    which top-p keeps its part. Where the filters would keep more than what is there, `beyond` is returned if it is
    given, else all that is there is kept.
    """
    known = size = len(weights)
    ends = False
    if top_p < 1.0:
        # The shortest run that holds `top_p` of the mass.
        nucleus = int(np.searchsorted(cumulative, top_p * total)) + 1
        ends, size = nucleus <= known, min(size, nucleus)
    if min_p > 0.0:
        likely = int(np.count_nonzero(weights >= min_p))
        ends, size = ends or likely < known, min(size, likely)
    if not ends and beyond is not None:
        return beyond
    # Rounding may put the product on the end itself.
    return min(int(np.searchsorted(cumulative[:size], u * float(cumulative[size - 1]), side="right")), size - 1)


def _others(
    ids: NDArray[np.int64],
    logits: NDArray[np.floating],
    best: float,
    temperature: float,
    scratch: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """The weights of the whole row, as shares of the highest, with 0 for the candidates.

    The candidates' own mass is known better than the row's sum knows it: added to only the others, the two agree.
    """
    weights: NDArray[np.float32] = np.subtract(logits, np.float32(best), out=scratch, dtype=np.float32)
    np.multiply(weights, np.float32(1.0 / temperature), out=weights)
    np.exp(weights, out=weights)
    weights[ids] = 0.0
    return weights


def _draw_wide(
    logits: NDArray[np.floating],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    total: float = 0.0,
) -> int:
    """The rarer case: the filters reach beyond the candidates. Without top-k `total` is the mass of the whole row.

    Sorts ever more of the highest logits until they hold what is kept: to sort all 49,152 takes 7 ms.
    """
    size = top_k or 4 * CANDIDATES
    while True:
        order = _best(logits, size)
        kept = logits[order].astype(np.float64)
        weights = np.exp((kept - kept[0]) / temperature)
        cumulative = np.cumsum(weights)
        if top_k or size >= len(logits):
            return int(order[_pick(weights, cumulative, float(cumulative[-1]), top_p, min_p, u)])
        index = _pick(weights, cumulative, total, top_p, min_p, u, len(order))
        if index < len(order):
            return int(order[index])
        size *= 4


def _best(logits: NDArray[np.floating], size: int) -> NDArray[np.int64]:
    """The ids of the `size` highest logits, best first; of equal ones the lower id first."""
    if size < len(logits):
        least = np.partition(logits, len(logits) - size)[-size]
        ids = np.flatnonzero(logits >= least)
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")[:size]]
