"""Draws against exact probabilities, computed here by a plain reference over the whole row."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from emberd.sampling import draw, uniform
from fakeport import Sampling

CANDIDATES = 256


def row(kind: str) -> NDArray[np.float32]:
    """Logits of one kind, always the same."""
    rng = np.random.Generator(np.random.PCG64(11))
    logits = {
        "peaked": rng.standard_normal(4000) * 4.0,
        "flat": rng.standard_normal(4000) * 0.2,
        "level": np.zeros(1000),
        "small": rng.standard_normal(300),
        "masked": np.where(np.arange(2000) % 3, rng.standard_normal(2000), -np.inf),
    }[kind]
    return logits.astype(np.float32)


def exact(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The probability of every token after temperature, top-k and top-p, in that order."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0.0
    weights /= weights.sum()
    if sampling.top_p < 1.0:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p]] = 0.0
    return weights / weights.sum()


def from_graph(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    order = np.argsort(-logits, kind="stable")[:CANDIDATES]
    return logits[order], order


SETTINGS = [
    Sampling(1.0),
    Sampling(0.7, top_p=0.9),
    Sampling(1.5, top_k=40),
    Sampling(1.0, top_p=0.5, top_k=100),
    Sampling(1.0, top_k=256),
    Sampling(1.0, top_k=257),
    Sampling(0.9, top_p=0.801, top_k=900),
    Sampling(2.0, top_p=0.99),
    Sampling(1.0, top_p=0.999999),
    Sampling(1.0, top_k=10**6),
]


@pytest.mark.parametrize("kind", ["peaked", "flat", "level", "small", "masked"])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_every_token_gets_its_exact_share_of_the_unit_interval(kind: str, sampling: Sampling) -> None:
    """Over an even grid of uniform numbers each token must come up as often as its probability says, to within one."""
    logits = row(kind)
    values, ids = from_graph(logits)
    grid = 4000
    drawn = [draw(values, ids, logits, sampling, (i + 0.5) / grid) for i in range(grid)]
    counts = np.bincount(drawn, minlength=len(logits))
    expected = exact(logits, sampling) * grid
    assert np.abs(counts - expected).max() <= 1.0 + 1e-3


@pytest.mark.parametrize("kind", ["peaked", "flat"])
@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[1], SETTINGS[3], SETTINGS[6]], ids=str)
def test_seeded_draws_follow_the_distribution(kind: str, sampling: Sampling) -> None:
    """Chi-square over bins of at least 20 expected draws, bounded at five standard deviations."""
    logits = row(kind)
    values, ids = from_graph(logits)
    n = 6000
    drawn = [draw(values, ids, logits, sampling, uniform(1234, i)) for i in range(n)]
    expected = exact(logits, sampling) * n
    counts = np.bincount(drawn, minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    order = np.argsort(-expected)
    bins = np.floor(np.cumsum(expected[order]) / 20).astype(int)
    sums, seen = np.bincount(bins, expected[order]), np.bincount(bins, counts[order])
    full = sums >= 10
    statistic = float(((seen[full] - sums[full]) ** 2 / sums[full]).sum())
    freedom = int(full.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2**-53])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_ends_of_the_interval_draw_a_token_that_may_be_drawn(u: float, sampling: Sampling) -> None:
    for kind in ("peaked", "level", "masked"):
        logits = row(kind)
        token = draw(*from_graph(logits), logits, sampling, u)
        assert exact(logits, sampling)[token] > 0


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    values, ids = logits.copy(), np.arange(3)
    drawn = {draw(values, ids, logits, Sampling(1.0, top_p=0.6), i / 100) for i in range(100)}
    assert drawn == {0, 1}


def test_a_vanishing_top_p_or_temperature_or_a_top_k_of_one_is_greedy() -> None:
    logits = row("flat")
    best = int(logits.argmax())
    for sampling in (Sampling(9.0, top_p=1e-12), Sampling(1e-300), Sampling(9.0, top_k=1)):
        assert {draw(*from_graph(logits), logits, sampling, i / 50) for i in range(50)} == {best}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = np.full(400, bad, np.float32)
    with pytest.raises(ValueError, match="highest logit"):
        draw(logits[:CANDIDATES], np.arange(CANDIDATES), logits, Sampling(), 0.5)


def test_half_precision_logits_draw_like_their_own_values() -> None:
    logits = row("peaked").astype(np.float16)
    values, ids = from_graph(logits)
    wide = logits.astype(np.float32)
    for sampling in SETTINGS:
        for u in (0.05, 0.5, 0.95):
            assert draw(values, ids, logits, sampling, u) == draw(values.astype(np.float32), ids, wide, sampling, u)


def test_the_uniform_numbers_are_splitmix64() -> None:
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [uniform(1234567, n) for n in range(5)] == [(each >> 11) / 2**53 for each in first]


def test_the_uniform_numbers_are_even_for_the_largest_seed_and_for_neighbouring_ones() -> None:
    for numbers in ([uniform(2**64 - 1, n) for n in range(4000)], [uniform(seed, 0) for seed in range(4000)]):
        assert min(numbers) >= 0.0
        assert max(numbers) < 1.0
        tenths = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert ((tenths - 400) ** 2 / 400).sum() < 9 + 5 * 18**0.5
