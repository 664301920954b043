"""Sequences laid end to end in the order that the forward pass wants, without padding and without torch.

Axes: T packed input tokens, A answer tokens (the targets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One micro-batch, ready for the forward pass. A sequence's last token is a target only, never an input."""

    inputs: NDArray[np.int64]  # [T] token ids
    positions: NDArray[np.int64]  # [T] position of each input in its sequence
    blocks: tuple[tuple[int, int], ...]  # (sequences, input tokens of each), in the order of `inputs`
    rows: NDArray[np.int64]  # [A] inputs that predict an answer token
    targets: NDArray[np.int64]  # [A] the answer tokens
    source: NDArray[np.int64]  # [A] where the answer tokens stand in the arrays that were packed


def pack(
    tokens: NDArray[np.int32], lengths: NDArray[Any], prompt_lengths: NDArray[Any], chosen: Sequence[int]
) -> Packed:
    """Pack the `chosen` of N sequences that lie end to end in `tokens`.

    lengths: [N] tokens of each sequence, prompt and answer; prompt_lengths: [N], each at least 1.
    """
    ends = np.cumsum(lengths)
    order = sorted(chosen, key=lambda index: lengths[index])
    inputs: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    answer: list[NDArray[np.bool_]] = []
    blocks: list[tuple[int, int]] = []
    for length, members in groupby(order, key=lambda index: lengths[index]):
        block = np.fromiter(members, np.int64)
        steps = np.arange(length - 1)
        inputs.append((ends[block, None] - length + steps).ravel())
        positions.append(np.broadcast_to(steps, (len(block), len(steps))).ravel())
        answer.append((steps >= prompt_lengths[block, None] - 1).ravel())
        blocks.append((len(block), int(length) - 1))
    source = np.concatenate(inputs)
    rows = np.flatnonzero(np.concatenate(answer))
    targets = source[rows] + 1
    return Packed(
        inputs=tokens[source].astype(np.int64),
        positions=np.concatenate(positions),
        blocks=tuple(blocks),
        rows=rows,
        targets=tokens[targets].astype(np.int64),
        source=targets,
    )


def idle() -> Packed:
    """The smallest micro-batch: for a rank that must take part in a pass and has nothing left to do."""
    return pack(np.zeros(2, np.int32), np.array([2]), np.array([1]), [0])
