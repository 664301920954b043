"""Partition of a batch: groups into PPO minibatches, minibatches over ranks, a rank's share into micro-batches.

Pure functions of what every rank knows, so that all ranks derive the same partition without communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

from areal_core.errors import ConfigError


def cut_minibatches(groups: int, count: int, *, seed: int, step: int) -> list[list[int]]:
    """Shuffle groups 0 .. groups - 1 and cut them into `count` PPO minibatches whose sizes differ by one at most.

    The order depends on (seed, step) alone: it is the same on every rank, after every restart, with every numpy.
    Raises ConfigError where `count` is not between 1 and `groups`.
    """
    if not 1 <= count <= groups:
        raise ConfigError(f"training.minibatches: must be between 1 and the groups in a batch ({groups}), got {count}")

    def shuffled(group: int) -> bytes:
        return hashlib.sha256(f"{seed}/{step}/{group}".encode()).digest()

    order = sorted(range(groups), key=shuffled)
    cuts = [groups * i // count for i in range(count + 1)]
    return [order[start:end] for start, end in pairwise(cuts)]


def partition(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Partition items that cost `costs[i]` each over ranks: largest first, each to the rank with the least cost so far.

    Returns the items of each rank, ascending. Ties go to the lower item and the lower rank. No rank is left empty while
    another holds two items that cost something.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in _longest_first(costs):
        lightest = loads.index(min(loads))
        shares[lightest].append(item)
        loads[lightest] += costs[item]
    return [sorted(share) for share in shares]


def shard(costs: Sequence[int], minibatches: int, ranks: int, *, seed: int, step: int) -> list[list[list[int]]]:
    """Which groups each rank trains on, by minibatch: `shard(...)[rank][minibatch]` lists groups, ascending.

    `costs[g]` is what training on group g costs, in tokens or FLOPs. Minibatches hold the same groups whatever the
    number of ranks; each of them is balanced over the ranks by cost, because ranks wait for each other at the end of
    every minibatch.
    """
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for groups in cut_minibatches(len(costs), minibatches, seed=seed, step=step):
        for rank, items in enumerate(partition([costs[group] for group in groups], ranks)):
            shares[rank].append(sorted(groups[item] for item in items))
    return shares


def allocate(
    lengths: Sequence[int], capacity: int, min_microbatches: int = 1, sequences: Sequence[int] | None = None
) -> list[list[int]]:
    """Dynamic micro-batching (paper, Algorithm 1): indices of `lengths` by micro-batch.

    Longest first, each sequence opens a new micro-batch while there are fewer than `min_microbatches` or none has room
    within `capacity` tokens; else it joins the one, among those with room, that holds the fewest sequences. Where items
    are several sequences each, which stay together, `sequences` says how many.
    Raises ConfigError for one longer than `capacity`.
    """
    microbatches: list[list[int]] = []
    loads: list[int] = []
    held: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        _check_fits(length, capacity)
        roomy = [i for i, load in enumerate(loads) if load + length <= capacity]
        if len(microbatches) < min_microbatches or not roomy:
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
    prompts: Sequence[int], completions: Sequence[Sequence[int]], capacity: int, min_microbatches: int = 1
) -> list[list[list[tuple[int, int]]]]:
    """Algorithm 1 where a group's prompt is computed once for all completions that are in one micro-batch.

    prompts: tokens of each group's prompt; completions: tokens of each of the group's completions. A group stays
    together, as one item of its prompt and all its completions, unless that is more than `capacity`: then its
    completions, longest first, fill several items, each with the prompt. Returns micro-batches of items of (group,
    completion).
    Raises ConfigError for a sequence longer than `capacity`.
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
    cut = allocate(loads, capacity, min_microbatches, [len(item) for item in items])
    return [[items[index] for index in members] for members in cut]


def _check_fits(length: int, capacity: int) -> None:
    if length > capacity:
        raise ConfigError(
            f"training.microbatch_tokens: must hold the longest sequence, {length} tokens, got {capacity}"
        )


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])
