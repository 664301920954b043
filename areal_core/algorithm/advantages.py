"""Advantages of rollouts, from their rewards (no critic), and which tokens of which sequences have them.

Axes: P groups of a global batch, G rollouts of a group, K parts of a rollout that have a return of their own
(`algorithm.credit`); a rollout weighs the same however many parts it has. Pure functions; arithmetic is float64. What
has no reward (NaN) is left out of means and deviations, and has the advantage 0; a reward that is infinite raises
RewardError. Sources and equations: docs/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from areal_core.config.algorithm import AlgorithmConfig
from areal_core.errors import RewardError
from areal_core.types import PackedGroup, Return

Float64Array = NDArray[np.float64]

_EPS = 1e-6  # added to standard deviations
_GROUP, _BATCH = (1, 2), (0, 1, 2)  # axes


def group_advantages(rewards: ArrayLike) -> Float64Array:
    """(r - mean) / (population standard deviation + 1e-6) within each group. [P, G] or [P, G, K] -> the same shape.

    Exactly zero in a group whose rewards are all equal: none of its completions is better than another.
    """
    return _normalised(rewards, _GROUP)


def group_mean_advantages(rewards: ArrayLike) -> Float64Array:
    """r - mean of the group, not scaled (Dr. GRPO). [P, G] or [P, G, K] -> the same shape; zero where all rewards of a
    group are equal."""
    return _Compared(rewards, _GROUP).centred().reshape(np.shape(rewards))


def batch_advantages(rewards: ArrayLike) -> Float64Array:
    """(r - mean) / (population standard deviation + 1e-6) over the global batch, as in the paper. [P, G] or [P, G, K]
    -> the same shape; zero where all rewards of the batch are equal."""
    return _normalised(rewards, _BATCH)


def batch_token_advantages(rewards: ArrayLike, tokens: ArrayLike) -> Float64Array:
    """As `batch_advantages`, with the mean and the deviation of the loss tokens of the batch, each of which has its
    rollout's reward: what the paper's authors released normalises so. A long rollout counts more, and the advantages of
    all tokens sum to 0. rewards: [P, G] or [P, G, K]; tokens: [P, G] -> the shape of the rewards."""
    return _normalised(rewards, _BATCH, np.asarray(tokens, dtype=np.float64))


def leave_one_out_advantages(rewards: ArrayLike) -> Float64Array:
    """r minus the mean of the group's other rollouts (RLOO), not scaled. [P, G] or [P, G, K] -> the same shape."""
    compared = _Compared(rewards, _GROUP)
    count = (compared.weights.sum(axis=2, keepdims=True) > 0).sum(axis=1, keepdims=True)
    own = np.where(compared.there, compared.values - compared.mean(compared.values, (2,)), 0.0)
    advantages = np.where(compared.varied, (compared.centred() * count - own) / np.maximum(count - 1, 1), 0.0)
    return advantages.reshape(np.shape(rewards))


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


def discounted(rewards: Sequence[float], discount: float) -> list[float]:
    """The return of each turn: its reward, and those of later turns, with a factor `discount` for every turn between.
    [K] -> [K]."""
    returns, later = [0.0] * len(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        returns[turn] = later = rewards[turn] + discount * later
    return returns


class Credit(NamedTuple):
    """The advantages of one group's sequences, part by part from each one's prompt to its end. [C] parts."""

    sequences: NDArray[np.int64]  # ascending
    tokens: NDArray[np.int64]
    advantages: Float64Array

    def moves(self) -> list[bool]:
        """Of each sequence whether it has an advantage."""
        return (np.bincount(self.sequences, self.advantages != 0) > 0).tolist()


def advantages_of(groups: Sequence[PackedGroup], algorithm: AlgorithmConfig, max_new_tokens: int) -> list[Credit]:
    """`algorithm.advantage` of the returns of a batch, with the length penalty where `overlong_cache` is set.

    Without returns of its own (`algorithm.credit`), every token of a rollout has the rollout's reward. The penalty of a
    rollout is that of its longest sequence, which has at most `max_new_tokens`.
    """
    parts = [group.returns or _whole(group) for group in groups]
    rollouts = [
        np.array(group.rollout_of)[[part.sequence for part in its]] for group, its in zip(groups, parts, strict=True)
    ]
    places = [_places(each) for each in rollouts]
    shape = len(groups), len(groups[0].rewards), 1 + max(int(each.max()) for each in places)
    returns, shaped = np.full(shape, np.nan), np.zeros(shape[:2])
    for row, its in enumerate(parts):
        returns[row, rollouts[row], places[row]] = np.array([part.value for part in its], np.float64)
    if algorithm.overlong_cache is not None:
        for row, group in enumerate(groups):
            np.maximum.at(shaped[row], np.array(group.rollout_of), group.lengths)
        shaped = overlong_penalties(
            shaped, limit=max_new_tokens, cache=algorithm.overlong_cache, penalty=algorithm.overlong_penalty
        )
    returns += shaped[:, :, None]
    if algorithm.advantage == "batch_tokens":
        found = batch_token_advantages(returns, [group.loss_tokens for group in groups])
    else:
        found = ADVANTAGES[algorithm.advantage](returns)
    return [_credit(its, found[row, rollouts[row], places[row]]) for row, its in enumerate(parts)]


def _whole(group: PackedGroup) -> list[Return]:
    """Every sequence with the reward of its rollout."""
    return [
        Return(sequence, length, group.rewards[rollout])
        for sequence, (length, rollout) in enumerate(zip(group.lengths, group.rollout_of, strict=True))
    ]


def _places(rollouts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the parts of rollouts, which are ascending, the place of each in its own."""
    starts = np.flatnonzero(np.diff(rollouts, prepend=-1))
    return np.arange(len(rollouts)) - np.repeat(starts, np.diff(starts, append=len(rollouts)))


def _credit(parts: Sequence[Return], advantages: Float64Array) -> Credit:
    sequences, ends = np.array([(part.sequence, part.end) for part in parts], np.int64).T
    begins = np.where(np.diff(sequences, prepend=-1) != 0, 0, np.roll(ends, 1))
    return Credit(sequences, ends - begins, advantages)


class _Compared:
    """Rewards that advantages compare along some axes. All arrays are [P, G, K]."""

    def __init__(self, rewards: ArrayLike, axes: tuple[int, ...], of_rollouts: Float64Array | None = None) -> None:
        """`of_rollouts`: the weight of each rollout in a mean, [P, G]; 1 by default."""
        values = np.asarray(rewards, dtype=np.float64)
        assert values.ndim in (2, 3), "rewards are groups x rollouts, or groups x rollouts x parts"
        if np.isinf(values).any():
            raise RewardError(f"rewards: must be finite, got {values[np.isinf(values)][0]}")
        self.values = np.atleast_3d(values)
        self.there = ~np.isnan(self.values)
        self.weights = self.there / np.maximum(self.there.sum(axis=2, keepdims=True), 1)
        if of_rollouts is not None:
            self.weights = self.weights * of_rollouts[:, :, None]
        self.axes = axes

    @property
    def varied(self) -> NDArray[np.bool_]:
        """Where there is a reward, and not all are equal; from the rewards, as a deviation of 0 may come out as
        1e-17."""
        highest = np.fmax.reduce(self.values, axis=self.axes, keepdims=True)
        return self.there & (highest != np.fmin.reduce(self.values, axis=self.axes, keepdims=True))

    def centred(self) -> Float64Array:
        """r - mean; 0 without a reward, and exactly 0 where all rewards are equal."""
        return np.where(self.varied, self.values - self.mean(self.values, self.axes), 0.0)

    def mean(self, values: Float64Array, axes: tuple[int, ...]) -> Float64Array:
        """By weight, of the values whose rewards are there; 0 where none is."""
        total = np.sum(self.weights, axis=axes, keepdims=True)
        sums = np.sum(np.where(self.there, values, 0.0) * self.weights, axis=axes, keepdims=True)
        return sums / np.where(total > 0, total, 1.0)


def _normalised(rewards: ArrayLike, axes: tuple[int, ...], of_rollouts: Float64Array | None = None) -> Float64Array:
    compared = _Compared(rewards, axes, of_rollouts)
    centred = compared.centred()
    return (centred / (np.sqrt(compared.mean(centred**2, axes)) + _EPS)).reshape(np.shape(rewards))
