"""How the terms of a minibatch's tokens become one loss: each is weighted, and the sum is divided by a denominator that
all ranks add up. Both belong to whole answers, so neither the cut into micro-batches nor that into ranks matters.

Axes: N answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


class Mean(NamedTuple):
    weights: Float64Array  # [N] of each loss token of an answer
    denominator_terms: (
        Float64Array  # [N] what the answer adds to the denominator: 0 exactly where it has no loss tokens
    )


def token_mean(loss_tokens: NDArray[np.int64], limit: int) -> Mean:
    """Over all loss tokens alike: a long answer counts for more than a short one (AReaL, DAPO)."""
    return Mean(np.ones(len(loss_tokens)), loss_tokens.astype(np.float64))


def sequence_mean(loss_tokens: NDArray[np.int64], limit: int) -> Mean:
    """Over answers, of the mean over each answer's loss tokens (GRPO): a token of a long answer counts for less."""
    return Mean(1.0 / np.maximum(loss_tokens, 1), (loss_tokens > 0).astype(np.float64))


def constant_mean(loss_tokens: NDArray[np.int64], limit: int) -> Mean:
    """The sum over loss tokens, divided by answers times `limit`, the most tokens that an answer may have (Dr. GRPO): a
    token counts the same whatever the answers' lengths are."""
    return Mean(np.ones(len(loss_tokens)), (loss_tokens > 0).astype(np.float64) * limit)


LOSS_MEANS: dict[str, Callable[[NDArray[np.int64], int], Mean]] = {  # by AlgorithmConfig.loss_mean
    "token": token_mean,
    "sequence": sequence_mean,
    "constant": constant_mean,
}
