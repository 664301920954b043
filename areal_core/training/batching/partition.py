"""Partition a batch: groups into minibatches, sequences over ranks and into micro-batches.

All functions are pure and use only data that every rank has. So all ranks derive the same partition without
communication.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_core.errors import ConfigError

_GOOD = 1.005  # times an equal share: good enough to stop searching


class PromptCost(NamedTuple):
    """Training cost of the sequences of a group that share a prompt, in tokens or FLOPs."""

    prompt: float  # once for each rank that has any of them
    completions: Sequence[float]  # of each completion; 0 without a gradient
    members: Sequence[int]  # their indices in the group


class Part(NamedTuple):
    """Some of the sequences of a group."""

    group: int
    sequences: tuple[int, ...]  # ascending


def cut_minibatches(groups: int, count: int, *, seed: int, step: int) -> list[list[int]]:
    """Shuffle groups 0 .. groups - 1 into `count` PPO minibatches whose sizes differ by at most 1.

    The order depends only on (seed, step): it is the same on every rank, after every restart, with every numpy. Raises
    ConfigError unless `count` is between 1 and `groups`.
    """
    if not 1 <= count <= groups:
        raise ConfigError(f"training.minibatches: must be between 1 and the groups in a batch ({groups}), got {count}")

    def shuffled(group: int) -> bytes:
        return hashlib.sha256(f"{seed}/{step}/{group}".encode()).digest()

    order = sorted(range(groups), key=shuffled)
    cuts = [groups * i // count for i in range(count + 1)]
    return [order[start:end] for start, end in pairwise(cuts)]


def partition(costs: Sequence[PromptCost], ranks: int) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Partition sequences over ranks so that the slowest rank finishes early.

    Sequences of a prompt stay together or are cut into 2, 4, ... pieces. The search stops at a maximum within 0.5 % of
    an equal share, or else takes the best partition found. The most expensive pieces go first, each to the rank that
    then finishes first. A rank pays for a prompt once.

    Returns for each rank (place in `costs`, members), ascending. Ties go to the lower place, member and rank.
    """
    share = sum(cost.prompt * any(cost.completions) + sum(cost.completions) for cost in costs) / ranks
    most = max((len(cost.completions) for cost in costs), default=0)
    pieces, (best, least) = 1, _placed(costs, 1, ranks)
    while ranks > 1 and pieces < most and least > _GOOD * share:
        pieces *= 2
        parts, last = _placed(costs, pieces, ranks)
        if last < least:
            best, least = parts, last
    return best


def _placed(
    costs: Sequence[PromptCost], pieces: int, ranks: int
) -> tuple[list[list[tuple[int, tuple[int, ...]]]], float]:
    """Cut each prompt into `pieces` and place them. Returns each rank's sequences, and the cost of the slowest rank.

    Pieces without cost go to a rank that has others of their prompt, or else to the rank with the fewest sequences.
    """
    cut = [
        (sum(cost.completions[index] for index in piece), prompt, piece)
        for prompt, cost in enumerate(costs)
        for piece in _cut(cost.completions, pieces)
    ]
    held: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(ranks)]  # for each rank: prompt -> sequences
    holders: list[list[int]] = [[] for _ in costs]  # for each prompt: ranks with any of its sequences
    loads, counts = np.zeros(ranks), np.zeros(ranks, np.int64)
    for cost, prompt, piece in sorted(cut, key=lambda each: -each[0] - costs[each[1]].prompt * (each[0] > 0)):
        if cost:
            ends = loads + costs[prompt].prompt
            ends[holders[prompt]] -= costs[prompt].prompt
            rank = int(ends.argmin())
            loads[rank] = ends[rank] + cost
        else:
            rank = holders[prompt][0] if holders[prompt] else int(counts.argmin())
        if rank not in holders[prompt]:
            holders[prompt].append(rank)
        counts[rank] += len(piece)
        held[rank][prompt] += [costs[prompt].members[index] for index in piece]
    return [[(prompt, tuple(sorted(share[prompt]))) for prompt in sorted(share)] for share in held], float(loads.max())


def _cut(costs: Sequence[float], pieces: int) -> list[list[int]]:
    """Cut items into `pieces` of about equal cost: the most expensive first, each to the cheapest piece."""
    cut: list[list[int]] = [[] for _ in range(min(pieces, len(costs)))]
    sums = [(0.0, 0, place) for place in range(len(cut))]  # cost, items
    for item in _longest_first(costs):
        cost, items, place = heapq.heappop(sums)
        cut[place].append(item)
        heapq.heappush(sums, (cost + costs[item], items + 1, place))
    return cut


def shard(
    costs: Sequence[Sequence[PromptCost]], minibatches: int, ranks: int, *, seed: int, step: int
) -> list[list[list[Part]]]:
    """Return each rank's parts of groups by minibatch, ascending: `shard(...)[rank][minibatch]`.

    `costs` holds each group's costs by prompt. Minibatches hold the same groups whatever the number of ranks. Each
    minibatch is balanced over the ranks, because ranks wait for each other at its end.
    """
    shares: list[list[list[Part]]] = [[] for _ in range(ranks)]
    for groups in cut_minibatches(len(costs), minibatches, seed=seed, step=step):
        prompts = [(group, cost) for group in sorted(groups) for cost in costs[group]]
        for rank, parts in enumerate(partition([cost for _, cost in prompts], ranks)):
            held: dict[int, list[int]] = defaultdict(list)
            for prompt, members in parts:
                held[prompts[prompt][0]] += members
            shares[rank].append([Part(group, tuple(sorted(members))) for group, members in held.items()])
    return shares


def allocate(lengths: Sequence[int], capacity: int, sequences: Sequence[int] | None = None) -> list[list[int]]:
    """Dynamic micro-batching (paper, Algorithm 1, k_min = 1). Returns indices of `lengths` by micro-batch.

    Longest first, a sequence joins the micro-batch with the fewest sequences among those with room in `capacity`
    tokens. If none has room, it opens a new one. An item may also stand for several sequences that stay together;
    `sequences` then gives their number. Raises ConfigError for an item longer than `capacity`.
    """
    microbatches: list[list[int]] = []
    loads: list[int] = []
    held: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        if length > capacity:
            raise ConfigError(
                f"training.microbatch_tokens: must hold the longest sequence, {length} tokens, got {capacity}"
            )
        roomy = [i for i, load in enumerate(loads) if load + length <= capacity]
        if not roomy:
            microbatches.append([])
            loads.append(0)
            held.append(0)
            roomy = [len(microbatches) - 1]
        fewest = min(roomy, key=held.__getitem__)
        microbatches[fewest].append(index)
        loads[fewest] += length
        held[fewest] += 1 if sequences is None else sequences[index]
    return microbatches


def allocate_groups(
    prompts: Sequence[int], completions: Sequence[Sequence[int]], capacity: int
) -> list[list[list[tuple[int, int]]]]:
    """Apply Algorithm 1 to groups whose prompt is computed once for all completions in a micro-batch.

    `prompts` has the tokens of each group's prompt, `completions` those of each of its completions. A group is one item
    if it fits into `capacity`. Otherwise its completions, longest first, fill several items, each with the prompt.

    Returns micro-batches of items of (group, completion). Raises ConfigError for a sequence longer than `capacity`.
    """
    items: list[list[tuple[int, int]]] = []
    loads: list[int] = []
    for group, (prompt, lengths) in enumerate(zip(prompts, completions, strict=True)):
        room = 0
        for completion in _longest_first(lengths):
            length = lengths[completion]
            if length > room:
                items.append([])
                loads.append(prompt)
                room = capacity - prompt
            items[-1].append((group, completion))
            loads[-1] += length
            room -= length
    cut = allocate(loads, capacity, [len(item) for item in items])
    return [[items[index] for index in members] for members in cut]


def _longest_first(lengths: Sequence[float]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])
