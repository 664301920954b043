"""Pack sequences end to end in the order of the forward pass, without padding and without torch.

`pack` lays out whole sequences: prompt and completion. `pack_shared` lays out a group's prompt once, followed by its
completions. Each of these attends to the prompt and to itself, with the positions of its own sequence. So both layouts
give the same results.

Axes: T packed input tokens, A completion tokens (the targets).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Block(NamedTuple):
    """Adjacent sequences of the same length."""

    sequences: int
    tokens: int  # inputs of each sequence
    prompt: int | None = None  # index in the pack of the prompt that all of them also attend to


Blocks = tuple[Block, ...]  # in the order of the inputs; shared prompts come first


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One micro-batch, ready for the forward pass. A sequence's last token is a target only, never an input."""

    inputs: NDArray[np.int64]  # [T] token ids
    positions: NDArray[np.int64]  # [T] position of each input in its sequence
    blocks: Blocks
    rows: NDArray[np.int64]  # [A] input that predicts each target; a shared prompt's last input predicts several
    targets: NDArray[np.int64]  # [A] the completion tokens
    source: NDArray[np.int64]  # [A] index of each target in the packed arrays

    @property
    def context(self) -> int:
        """Number of positions: tokens of the longest sequence except its last one."""
        return int(self.positions.max()) + 1


def pack(
    tokens: NDArray[np.int32], lengths: NDArray[Any], prompt_lengths: NDArray[Any], chosen: Iterable[int]
) -> Packed:
    """Pack the `chosen` of N sequences that lie end to end in `tokens`.

    `lengths`: [N] tokens of each sequence, prompt and completion. `prompt_lengths`: [N], each at least 1.
    """
    ends = np.cumsum(lengths)
    inputs: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    completion: list[NDArray[np.bool_]] = []
    blocks: list[Block] = []
    for length, block in _by_length(chosen, lengths):
        steps = np.arange(length - 1)
        inputs.append((ends[block, None] - length + steps).ravel())
        positions.append(np.broadcast_to(steps, (len(block), len(steps))).ravel())
        completion.append((steps >= prompt_lengths[block, None] - 1).ravel())
        blocks.append(Block(len(block), length - 1))
    source = np.concatenate(inputs)
    rows = np.flatnonzero(np.concatenate(completion))
    targets = source[rows] + 1
    return Packed(
        inputs=tokens[source].astype(np.int64),
        positions=np.concatenate(positions),
        blocks=tuple(blocks),
        rows=rows,
        targets=tokens[targets].astype(np.int64),
        source=targets,
    )


def pack_shared(
    tokens: NDArray[np.int32],
    lengths: NDArray[Any],
    prompt_lengths: NDArray[Any],
    groups: Sequence[Sequence[int]],
) -> Packed:
    """Pack sequences in `groups` that have the same prompt; other arguments as in `pack`.

    The inputs of all prompts come first, then those of single completions: all tokens but the last.
    """
    ends = np.cumsum(lengths)
    first = np.array([members[0] for members in groups])
    inputs: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    blocks: list[Block] = []
    rows: list[NDArray[np.int64]] = []
    sources: list[NDArray[np.int64]] = []
    prompts: list[tuple[int, int]] = []  # place in `groups`, row of the prompt's last token
    laid = 0
    for length, block in _by_length(range(len(groups)), prompt_lengths[first]):
        steps = np.arange(length)
        sequences = first[block]
        inputs.append(((ends - lengths)[sequences, None] + steps).ravel())
        positions.append(np.broadcast_to(steps, (len(block), length)).ravel())
        blocks.append(Block(len(block), length))
        prompts += [(group, laid + (place + 1) * length - 1) for place, group in enumerate(block.tolist())]
        laid += len(block) * length
    for prompt, (group, last_row) in enumerate(prompts):
        start = int(prompt_lengths[first[group]])
        for length, block in _by_length(groups[group], lengths):
            own = length - start - 1  # inputs of a completion
            places = (ends[block, None] - length + start) + np.arange(own + 1)
            predicting = laid + np.arange(len(block) * own).reshape(len(block), own)
            rows.append(np.insert(predicting, 0, last_row, axis=1).ravel())
            sources.append(places.ravel())
            if own:
                inputs.append(places[:, :-1].ravel())
                positions.append(np.broadcast_to(start + np.arange(own), (len(block), own)).ravel())
                blocks.append(Block(len(block), own, prompt))
                laid += len(block) * own
    source = np.concatenate(sources)
    return Packed(
        inputs=tokens[np.concatenate(inputs)].astype(np.int64),
        positions=np.concatenate(positions),
        blocks=tuple(blocks),
        rows=np.concatenate(rows),
        targets=tokens[source].astype(np.int64),
        source=source,
    )


def idle() -> Packed:
    """Return the smallest micro-batch, for a rank that must join a pass but has no work left."""
    return pack(np.zeros(2, np.int32), np.array([2]), np.array([1]), [0])


def _by_length(chosen: Iterable[int], lengths: NDArray[Any]) -> Iterable[tuple[int, NDArray[np.int64]]]:
    """Group the chosen by length, shortest first: (length, indices)."""
    for length, members in groupby(sorted(chosen, key=lambda index: lengths[index]), key=lambda index: lengths[index]):
        yield int(length), np.fromiter(members, np.int64)
