"""A plain reference of sampling over the full row of logits: every step as `docs/port.md` says it, nothing saved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from emberd.sampling import CANDIDATES, uniform
from fakeport import Sampling


def adjusted(
    logits: NDArray[np.floating], sampling: Sampling, prompt: list[int], answer: list[int]
) -> NDArray[np.float32]:
    """The row after penalties and biases, token by token."""
    row = logits.astype(np.float32)
    one = np.float32
    if sampling.repetition_penalty != 1.0:
        for token in {*prompt, *answer}:
            penalty = one(sampling.repetition_penalty)
            row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
    for token in set(answer):
        row[token] -= one(sampling.frequency_penalty) * one(answer.count(token))
        row[token] -= one(sampling.presence_penalty)
    for token, bias in sampling.logit_bias.items():
        row[token] += one(bias)
    return row


def touched(sampling: Sampling, prompt: list[int], answer: list[int]) -> set[int]:
    """The tokens whose logits may change."""
    penalised = (sampling.presence_penalty, sampling.frequency_penalty) != (0.0, 0.0)
    repeated = sampling.repetition_penalty != 1.0
    return {*sampling.logit_bias, *(prompt if repeated else ()), *(answer if repeated or penalised else ())}


def kept(row: NDArray[np.floating], sampling: Sampling) -> NDArray[np.int64]:
    """The tokens that top-k, top-p and min-p keep, likeliest first; of equal ones the lower id first."""
    order = np.argsort(-row, kind="stable")
    scaled = row.astype(np.float64)[order] / max(sampling.temperature, 1e-6)
    weights = np.exp(scaled - scaled[0])
    keep = np.ones(len(row), bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    mass = np.cumsum(np.where(keep, weights, 0.0))
    if sampling.top_p < 1.0:
        # The first token with which the share is reached is the last one that is kept.
        keep &= np.concatenate([[True], mass[:-1] < sampling.top_p * mass[-1]])
    keep &= weights >= sampling.min_p
    return order[keep]


def probabilities(row: NDArray[np.floating], sampling: Sampling) -> NDArray[np.float64]:
    """The probability of every token."""
    ids = kept(row, sampling)
    scaled = row.astype(np.float64)[ids] / max(sampling.temperature, 1e-6)
    weights = np.exp(scaled - scaled[0])
    result = np.zeros(len(row))
    result[ids] = weights / weights.sum()
    return result


def choose(logits: NDArray[np.floating], sampling: Sampling, prompt: list[int], answer: list[int]) -> int:
    """The next token of an answer.

    The uniform number runs over the kept tokens, likeliest first. Where nothing filters them, only those that are known
    to be the likeliest come in that order, and the others in order of their ids: they are not worth sorting.
    """
    row = adjusted(logits, sampling, prompt, answer)
    if sampling.temperature == 0:
        return int(np.argmax(row))
    ids = kept(row, sampling)
    if not sampling.top_k and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        changed = touched(sampling, prompt, answer)
        best = np.argsort(-logits, kind="stable")[:CANDIDATES]
        known = {*best.tolist()} - changed
        last = (-float(logits[best[-1]]), int(best[-1]))
        known |= {token for token in changed if (-float(row[token]), token) < last}
        if not known:
            known = {*ids[:CANDIDATES].tolist()}
        first = [token for token in ids.tolist() if token in known]
        ids = np.array(first + [token for token in range(len(row)) if token not in known])
    cumulative = np.cumsum(probabilities(row, sampling)[ids])
    place = np.searchsorted(cumulative, uniform(sampling.seed, len(answer)) * cumulative[-1], side="right")
    return int(ids[place])


def log_probabilities(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Of every token, by the model alone."""
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
