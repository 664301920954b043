"""Compute advantages from the rewards of rollouts, without a critic.

Axes: P groups of a global batch, G rollouts of a group, K parts of a rollout with a return of their own
(`algorithm.credit`). A rollout counts the same in every mean, however many parts it has.

All functions are pure and compute in float64. Means and deviations ignore NaN rewards, and their advantage is 0. An
infinite reward raises RewardError. Sources and equations: docs/algorithm.md.
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
    """Normalise rewards within each group: (r - mean) / (population standard deviation + 1e-6).

    Shapes: [P, G] or [P, G, K] -> the same. Advantages of a zero-variance group are exactly 0.
    """
    return _normalised(rewards, _GROUP)


def group_mean_advantages(rewards: ArrayLike) -> Float64Array:
    """Subtract the group's mean reward, without scaling (Dr. GRPO). [P, G] or [P, G, K] -> the same shape.

    Advantages of a zero-variance group are exactly 0.
    """
    return _Compared(rewards, _GROUP).centred().reshape(np.shape(rewards))


def batch_advantages(rewards: ArrayLike) -> Float64Array:
    """Normalise rewards over the global batch, as in the paper: (r - mean) / (deviation + 1e-6).

    The deviation is the population standard deviation. [P, G] or [P, G, K] -> the same shape. Advantages are exactly 0
    if all rewards of the batch are equal.
    """
    return _normalised(rewards, _BATCH)


def batch_token_advantages(rewards: ArrayLike, tokens: ArrayLike) -> Float64Array:
    """Normalise rewards over the loss tokens of the global batch, as the paper's released code does.

    Each loss token counts once, with its rollout's reward. So long rollouts count more in the mean and the deviation,
    and the advantages of all tokens sum to 0. `rewards`: [P, G] or [P, G, K]. `tokens`: loss tokens of each rollout,
    [P, G]. Returns the shape of `rewards`.
    """
    return _normalised(rewards, _BATCH, np.asarray(tokens, dtype=np.float64))


def leave_one_out_advantages(rewards: ArrayLike) -> Float64Array:
    """Subtract the mean reward of the group's other rollouts, without scaling (RLOO).

    Shapes: [P, G] or [P, G, K] -> the same.
    """
    compared = _Compared(rewards, _GROUP)
    count = (compared.weights.sum(axis=2, keepdims=True) > 0).sum(axis=1, keepdims=True)
    own = np.where(compared.there, compared.values - compared.mean(compared.values, (2,)), 0.0)
    advantages = np.where(compared.varied, (compared.centred() * count - own) / np.maximum(count - 1, 1), 0.0)
    return advantages.reshape(np.shape(rewards))


ADVANTAGES: dict[str, Callable[[ArrayLike], Float64Array]] = {  # by AlgorithmConfig.advantage, except batch_tokens
    "group": group_advantages,
    "group_mean": group_mean_advantages,
    "batch": batch_advantages,
    "leave_one_out": leave_one_out_advantages,
}


def overlong_penalties(lengths: ArrayLike, *, limit: int, cache: int, penalty: float) -> Float64Array:
    """Compute the soft length penalty that is added to a completion's reward (DAPO, Eq. 13).

    The penalty is 0 up to `limit` - `cache` tokens, then falls linearly to -`penalty` at `limit`. A truncated
    completion has `limit` tokens. Any shape -> the same shape.
    """
    over = np.asarray(lengths, dtype=np.float64) - (limit - cache)
    return -penalty * np.clip(over / cache, 0.0, 1.0)


def discounted(rewards: Sequence[float], discount: float) -> list[float]:
    """Return of each turn: its reward plus later ones, discounted once per turn. [K] -> [K]."""
    returns, later = [0.0] * len(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        returns[turn] = later = rewards[turn] + discount * later
    return returns


class Credit(NamedTuple):
    """Advantages of a group's sequences, split into C parts after each prompt. All arrays are [C]."""

    sequences: NDArray[np.int64]  # ascending indices of sequences
    tokens: NDArray[np.int64]
    advantages: Float64Array

    def moves(self) -> list[bool]:
        """Tell for each sequence whether any of its advantages is non-zero."""
        return (np.bincount(self.sequences, self.advantages != 0) > 0).tolist()


def advantages_of(groups: Sequence[PackedGroup], algorithm: AlgorithmConfig, max_new_tokens: int) -> list[Credit]:
    """Compute the advantages of a batch with the estimator `algorithm.advantage`.

    By default every token of a rollout has the rollout's reward as its return. `algorithm.credit` may set other
    returns. If `overlong_cache` is set, the length penalty is added: that of the rollout's longest sequence, of at most
    `max_new_tokens` tokens.
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
    """Return one part for each sequence, with the reward of its rollout."""
    return [
        Return(sequence, length, group.rewards[rollout])
        for sequence, (length, rollout) in enumerate(zip(group.lengths, group.rollout_of, strict=True))
    ]


def _places(rollouts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the parts of each rollout from 0. `rollouts` holds the rollout of each part, ascending."""
    starts = np.flatnonzero(np.diff(rollouts, prepend=-1))
    return np.arange(len(rollouts)) - np.repeat(starts, np.diff(starts, append=len(rollouts)))


def _credit(parts: Sequence[Return], advantages: Float64Array) -> Credit:
    sequences, ends = np.array([(part.sequence, part.end) for part in parts], np.int64).T
    begins = np.where(np.diff(sequences, prepend=-1) != 0, 0, np.roll(ends, 1))
    return Credit(sequences, ends - begins, advantages)


class _Compared:
    """Rewards compared along the given axes. All arrays are [P, G, K]."""

    def __init__(self, rewards: ArrayLike, axes: tuple[int, ...], of_rollouts: Float64Array | None = None) -> None:
        """`of_rollouts` is the weight of each rollout in a mean, [P, G]; 1 by default."""
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
        """Mask of the rewards that are present and not all equal along the axes.

        It compares rewards, because rounding can turn a deviation of 0 into 1e-17.
        """
        highest = np.fmax.reduce(self.values, axis=self.axes, keepdims=True)
        return self.there & (highest != np.fmin.reduce(self.values, axis=self.axes, keepdims=True))

    def centred(self) -> Float64Array:
        """Return r - mean: 0 for a missing reward, exactly 0 where all rewards are equal."""
        return np.where(self.varied, self.values - self.mean(self.values, self.axes), 0.0)

    def mean(self, values: Float64Array, axes: tuple[int, ...]) -> Float64Array:
        """Return the weighted mean of `values` over present rewards; 0 if there are none."""
        total = np.sum(self.weights, axis=axes, keepdims=True)
        sums = np.sum(np.where(self.there, values, 0.0) * self.weights, axis=axes, keepdims=True)
        return sums / np.where(total > 0, total, 1.0)


def _normalised(rewards: ArrayLike, axes: tuple[int, ...], of_rollouts: Float64Array | None = None) -> Float64Array:
    compared = _Compared(rewards, axes, of_rollouts)
    centred = compared.centred()
    return (centred / (np.sqrt(compared.mean(centred**2, axes)) + _EPS)).reshape(np.shape(rewards))
