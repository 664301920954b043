"""Advantages of completions, from their rewards (no critic, gamma = lambda = 1: every token has its completion's).

Axes: P groups of a global batch, G completions of a group. Pure functions; arithmetic is float64. A completion without
a reward (NaN) is left out of means and deviations, and has the advantage 0; a reward that is infinite raises
RewardError. Sources and equations: docs/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from areal_core.config.algorithm import AlgorithmConfig
from areal_core.errors import RewardError

Float64Array = NDArray[np.float64]

_EPS = 1e-6  # added to standard deviations


def group_advantages(rewards: ArrayLike) -> Float64Array:
    """(r - mean) / (population standard deviation + 1e-6) within each group. [P, G] -> [P, G].

    Exactly zero in a group whose rewards are all equal: none of its completions is better than another.
    """
    return _normalised(_checked(rewards), axis=1)


def group_mean_advantages(rewards: ArrayLike) -> Float64Array:
    """r - mean of the group, not scaled (Dr. GRPO). [P, G] -> [P, G]; zero where all rewards of a group are equal."""
    return _centred(_checked(rewards), axis=1)


def batch_advantages(rewards: ArrayLike) -> Float64Array:
    """(r - mean) / (population standard deviation + 1e-6) over the global batch, as in the paper. [P, G] -> [P, G];
    zero where all rewards of the batch are equal."""
    return _normalised(_checked(rewards), axis=None)


def batch_token_advantages(rewards: ArrayLike, lengths: ArrayLike) -> Float64Array:
    """As `batch_advantages`, with the mean and the deviation of the tokens of the batch, each of which has its
    completion's reward: what the paper's authors released normalises so. A long completion counts more, and the
    advantages of all tokens sum to 0. rewards, lengths (tokens): [P, G] -> [P, G]."""
    return _normalised(_checked(rewards), axis=None, weights=np.asarray(lengths, dtype=np.float64))


def leave_one_out_advantages(rewards: ArrayLike) -> Float64Array:
    """r minus the mean of the group's other completions (RLOO), not scaled. [P, G] -> [P, G]."""
    checked = _checked(rewards)
    count = (~np.isnan(checked)).sum(axis=1, keepdims=True)
    return _centred(checked, axis=1) * count / np.maximum(count - 1, 1)


ADVANTAGES: dict[str, Callable[[ArrayLike], Float64Array]] = {  # by AlgorithmConfig.advantage, but for batch_tokens
    "group": group_advantages,
    "group_mean": group_mean_advantages,
    "batch": batch_advantages,
    "leave_one_out": leave_one_out_advantages,
}


def overlong_penalties(lengths: ArrayLike, *, limit: int, cache: int, penalty: float) -> Float64Array:
    """The length penalty, added to a completion's reward (DAPO, Eq. 13): 0 up to `limit` - `cache` tokens, then
    linearly down to -`penalty` at `limit`, which a truncated completion has reached. Any shape -> the same shape.
    """
    over = np.asarray(lengths, dtype=np.float64) - (limit - cache)
    return -penalty * np.clip(over / cache, 0.0, 1.0)


def advantages_of(
    rewards: ArrayLike, lengths: ArrayLike, algorithm: AlgorithmConfig, max_new_tokens: int
) -> Float64Array:
    """`algorithm.advantage` of the rewards of a batch, with the length penalty where `overlong_cache` is set.

    rewards: [P, G]; lengths: [P, G] tokens, limited to `max_new_tokens`. Returns [P, G].
    """
    shaped = _checked(rewards)
    if algorithm.overlong_cache is not None:
        shaped = shaped + overlong_penalties(
            lengths, limit=max_new_tokens, cache=algorithm.overlong_cache, penalty=algorithm.overlong_penalty
        )
    if algorithm.advantage == "batch_tokens":
        return batch_token_advantages(shaped, lengths)
    return ADVANTAGES[algorithm.advantage](shaped)


def _checked(rewards: ArrayLike) -> Float64Array:
    checked = np.asarray(rewards, dtype=np.float64)
    assert checked.ndim == 2, "rewards are groups x completions"
    if np.isinf(checked).any():
        raise RewardError(f"rewards: must be finite, got {checked[np.isinf(checked)][0]}")
    return checked


def _normalised(rewards: Float64Array, axis: int | None, weights: Float64Array | None = None) -> Float64Array:
    centred = _centred(rewards, axis, weights)
    return centred / (np.sqrt(_mean(centred**2, ~np.isnan(rewards), axis, weights)) + _EPS)


def _centred(rewards: Float64Array, axis: int | None, weights: Float64Array | None = None) -> Float64Array:
    """r - mean, 0 without a reward, and exactly 0 where all rewards are equal."""
    there = ~np.isnan(rewards)
    mean = _mean(rewards, there, axis, weights)
    return np.where(there & ~_constant(rewards, axis), rewards - mean, 0.0)


def _mean(
    values: Float64Array, there: NDArray[np.bool_], axis: int | None, weights: Float64Array | None
) -> Float64Array:
    """Along `axis`, of the values that are there; by weight, all of them 1 by default. 0 where none is."""
    weights = np.ones_like(values) if weights is None else weights
    total = np.sum(weights, axis=axis, where=there, keepdims=True)
    return np.sum(values * weights, axis=axis, where=there, keepdims=True) / np.maximum(total, 1.0)


def _constant(rewards: Float64Array, axis: int | None) -> NDArray[np.bool_]:
    """Whether all rewards along `axis` are equal; from the rewards, as a deviation of 0 may come out as 1e-17."""
    return np.fmax.reduce(rewards, axis=axis, keepdims=True) == np.fmin.reduce(rewards, axis=axis, keepdims=True)
