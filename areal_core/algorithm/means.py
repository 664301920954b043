"""Means over the loss tokens of a minibatch: the weight of each token's term, and the loss denominator.

The loss is the weighted sum of the terms divided by the denominator, which is summed over all ranks. Both are given by
completion, so that neither the partition into micro-batches nor that over ranks changes the loss.

Axes: N completions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


class Mean(NamedTuple):
    weights: Float64Array  # [N] of each loss token of a completion
    denominator_terms: Float64Array  # [N] contributions to the loss denominator: 0 exactly without loss tokens


def token_mean(loss_tokens: NDArray[np.int64], limit: int) -> Mean:
    """Over all loss tokens alike: a long completion counts for more than a short one (AReaL, DAPO)."""
    return Mean(np.ones(len(loss_tokens)), loss_tokens.astype(np.float64))


def sequence_mean(loss_tokens: NDArray[np.int64], limit: int) -> Mean:
    """Over completions, of the mean over their loss tokens (GRPO): a token of a long completion counts for less."""
    return Mean(1.0 / np.maximum(loss_tokens, 1), (loss_tokens > 0).astype(np.float64))


def constant_mean(loss_tokens: NDArray[np.int64], limit: int) -> Mean:
    """The sum over loss tokens, divided by completions times `limit`, the most tokens that a completion may have (Dr.
    GRPO): a token counts the same whatever the completions' lengths are."""
    return Mean(np.ones(len(loss_tokens)), (loss_tokens > 0).astype(np.float64) * limit)


LOSS_MEANS: dict[str, Callable[[NDArray[np.int64], int], Mean]] = {  # by AlgorithmConfig.loss_mean
    "token": token_mean,
    "sequence": sequence_mean,
    "constant": constant_mean,
}
