"""Draws one token from one row of logits: temperature, top-k and top-p, exactly, with a seed for each request.

The graph hands over its highest logits (256 of them, sorted), which is nearly always enough; the full row is read
only where exact probabilities need it. Masks, penalties and log-probabilities are not made here. Order of the
filters: temperature, top-k, then top-p over what top-k left (https://arxiv.org/abs/1904.09751), as Hugging Face
applies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from emberd._core import Sampling

_MASK = 2**64 - 1
_LOWEST_TEMPERATURE = 1e-6
"""Below this the quotient of logit and temperature leaves the range of a float32; the draw is greedy long before."""


def uniform(seed: int, n: int) -> float:
    """The `n`-th uniform number in [0, 1) of a seed, with 53 bits: SplitMix64 (Steele, Lea and Flood, 2014).

    A counter-based generator has no state, so a request's numbers depend on nothing but its seed and how far its answer
    has come: not on the batch, and not on what was drawn before and thrown away. Costs 0.5 µs.
    """
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def draw(
    values: NDArray[np.floating],
    ids: NDArray[np.int64],
    logits: NDArray[np.floating],
    sampling: Sampling,
    u: float,
    scratch: NDArray[np.float32] | None = None,
) -> int:
    """The token id that the uniform number `u` falls on.

    `values` `[candidates]` are the highest logits in descending order and `ids` their token ids; `logits` `[vocab]` is
    the full row they come from. `scratch` `[vocab]` is room to work in: fresh memory for each draw costs as much again
    as the work. Raises `ValueError` when the logits are not numbers.
    """
    temperature = max(sampling.temperature, _LOWEST_TEMPERATURE)
    top_k, top_p = sampling.top_k, sampling.top_p
    highest = float(values[0])
    if not np.isfinite(highest):
        raise ValueError(f"the highest logit is {highest}")
    candidates = len(values)
    if top_k >= len(logits):
        top_k = 0
    if candidates < len(logits):
        if top_k > candidates:
            return _draw_wide(logits, temperature, top_k, top_p, u)
        if top_k == 0:
            return _draw_from_all(values, ids, logits, temperature, top_p, u, scratch)
    kept = values[:top_k] if top_k else values
    cumulative = np.cumsum(np.exp((kept.astype(np.float64) - highest) / temperature))
    return int(ids[_pick(cumulative, float(cumulative[-1]), top_p, u)])


def _pick(cumulative: NDArray[np.float64], total: float, top_p: float, u: float) -> int:
    """The index that `u` falls on in the nucleus: the shortest prefix that holds `top_p` of `total`.

    Returns `len(cumulative)` when the prefix would be longer than what is there.
    """
    size = len(cumulative)
    if top_p < 1.0:
        size = int(np.searchsorted(cumulative, top_p * total)) + 1
        if size > len(cumulative):
            return len(cumulative)
        total = float(cumulative[size - 1])
    # Rounding may put u * total on the end itself.
    return min(int(np.searchsorted(cumulative[:size], u * total, side="right")), size - 1)


def _draw_from_all(
    values: NDArray[np.floating],
    ids: NDArray[np.int64],
    logits: NDArray[np.floating],
    temperature: float,
    top_p: float,
    u: float,
    scratch: NDArray[np.float32] | None,
) -> int:
    """Without top-k the mass of the whole row counts. The candidates come first; the tail only where `u` reaches it."""
    highest = float(values[0])
    cumulative = np.cumsum(np.exp((values.astype(np.float64) - highest) / temperature))
    weights = np.subtract(logits, np.float32(highest), out=scratch, dtype=np.float32)
    np.multiply(weights, np.float32(1.0 / temperature), out=weights)
    np.exp(weights, out=weights)
    # The candidates' own mass is known better than the row's sum knows it: add only the tail, so the two always agree.
    weights[ids] = 0.0
    inside = float(cumulative[-1])
    tail = float(weights.sum())
    total = inside + tail
    if not np.isfinite(total):
        raise ValueError(f"the logits sum to {total}")
    if top_p < 1.0:
        index = _pick(cumulative, total, top_p, u)
        return int(ids[index]) if index < len(ids) else _draw_wide(logits, temperature, 0, top_p, u, total)
    target = u * total
    if target < inside or tail == 0.0:
        return int(ids[min(int(np.searchsorted(cumulative, target, side="right")), len(ids) - 1)])
    beyond = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(beyond, target - inside, side="right"))
    return index if index < len(beyond) else int(np.flatnonzero(weights)[-1])


def _draw_wide(
    logits: NDArray[np.floating], temperature: float, top_k: int, top_p: float, u: float, total: float = 0.0
) -> int:
    """The rarer case: the filters reach beyond the candidates. Without top-k `total` is the mass of the whole row.

    Sorts ever more of the highest logits until they hold the nucleus: to sort all 49,152 takes 7 ms.
    """
    size = top_k or 1024
    while True:
        order = _best(logits, size)
        kept = logits[order].astype(np.float64)
        cumulative = np.cumsum(np.exp((kept - kept[0]) / temperature))
        whole = float(cumulative[-1])
        if top_k or size >= len(logits):
            return int(order[_pick(cumulative, whole, top_p, u)])
        index = _pick(cumulative, total, top_p, u)
        if index < len(cumulative):
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
