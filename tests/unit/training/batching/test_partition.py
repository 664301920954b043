import pytest

from areal_core.errors import ConfigError
from areal_core.training.batching.partition import (
    GroupCost,
    allocate,
    allocate_groups,
    cut_minibatches,
    partition,
    shard,
)


@pytest.mark.parametrize(
    ("lengths", "capacity", "least", "microbatches"),
    [
        # Longest first: 9 and 7 open one each; 5 fits only beside 7 (12); 4 fits nowhere and opens the third; 3 fits
        # beside 9 and beside 4, which hold one sequence each: the first; 2 fits only beside 4.
        ([4, 9, 2, 7, 3, 5], 12, 2, [[1, 4], [3, 5], [0, 2]]),
        # 8 and 6 don't fit together, 3 fits beside 6 only; both then have room for 1, and 8 is alone.
        ([8, 6, 3, 1], 10, 1, [[0, 3], [1, 2]]),
        ([2, 2, 2, 2], 100, 3, [[0, 3], [1], [2]]),  # more than capacity asks for
        ([2, 2], 100, 5, [[0], [1]]),  # never an empty one
        ([], 10, 1, []),
    ],
)
def test_sequences_fill_microbatches_longest_first(lengths, capacity, least, microbatches):
    assert allocate(lengths, capacity, least) == microbatches
    if least == 1:
        assert allocate(lengths, capacity) == microbatches


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: allocate([3, 11], 10), "microbatch_tokens: must hold the longest sequence, 11 tokens, got 10"),
        (lambda: allocate_groups([5], [[2, 6]], 10), "microbatch_tokens: must hold the longest sequence, 11 tokens"),
        (
            lambda: cut_minibatches(4, 0, seed=0, step=0),
            r"minibatches: must be between 1 and the groups in a batch \(4",
        ),
        (
            lambda: cut_minibatches(4, 5, seed=0, step=0),
            r"minibatches: must be between 1 and the groups in a batch \(4",
        ),
    ],
)
def test_impossible_cuts_are_refused(call, said):
    with pytest.raises(ConfigError, match=rf"^training\.{said}"):
        call()


def test_completions_fill_an_item_to_the_last_token_of_its_room():
    """Of the six tokens that the prompt leaves, the longest takes four and another the last two."""
    assert allocate_groups([4], [[1, 4, 2]], 10) == [[[(0, 1), (0, 2)]], [[(0, 0)]]]


def test_minibatches_are_keyed_by_seed_and_step():
    # Fixed values: the order is part of what a resumed run must reproduce.
    assert cut_minibatches(8, 3, seed=1, step=1) == [[3, 2], [4, 6, 1], [5, 7, 0]]
    assert cut_minibatches(8, 3, seed=1, step=2) != cut_minibatches(8, 3, seed=1, step=1)
    assert cut_minibatches(8, 3, seed=2, step=1) != cut_minibatches(8, 3, seed=1, step=1)


@pytest.mark.parametrize(
    ("groups", "shares"),
    [
        # Of single completions: 9 -> rank 0, 7 -> 1, 5 -> 1 (12), 4 -> 0 (13), 3 -> 1 (15), 2 -> 0 (15)
        (
            [(0, [cost]) for cost in (4, 9, 2, 7, 3, 5)],
            [[(i, (0,)) for i in (0, 1, 2)], [(i, (0,)) for i in (3, 4, 5)]],
        ),
        # No further than balance gains.
        ([(0, [8, 2]), (0, [3, 7])], [[(0, (0, 1))], [(1, (0, 1))]]),
        # Halves, each the dearest first to the cheaper one: 8 | 7, 3 -> 7, 2 -> 8.
        ([(0, [8, 7, 2, 3])], [[(0, (0, 2))], [(0, (1, 3))]]),
        # Whole, 112 and 104; halved, each rank pays for both prompts.
        ([(100, [3, 3, 3, 3]), (100, [2, 2])], [[(0, (0, 1, 2, 3))], [(1, (0, 1))]]),
        ([(2, [30, 30])], [[(0, (0,))], [(0, (1,))]]),
        # Whole, 90 and 60. In halves 10 + 40 on one rank; on the other 10 + 40 as well, then one half of 60 each.
        ([(10, [20, 20, 20, 20]), (0, [30, 30])], [[(0, (0, 2)), (1, (0,))], [(0, (1, 3)), (1, (1,))]]),
        # Whole, 4 and 2.
        ([(0, [1, 1, 1, 1]), (0, [1]), (0, [1])], [[(0, (0, 2)), (1, (0,))], [(0, (1, 3)), (2, (0,))]]),
        # Whole, 1002 and 998, which is good enough; halved, 1001 and 999.
        ([(0, [501, 501]), (0, [500, 498])], [[(0, (0, 1))], [(1, (0, 1))]]),
        # The dearest is placed first, its prompt included.
        ([(3, [2]), (0, [4]), (0, [3])], [[(0, (0,))], [(1, (0,)), (2, (0,))]]),
        # Completions that cost nothing go with their group, or to the rank with the fewest.
        ([(5, [9, 0, 0]), (5, [0, 0]), (5, [0])], [[(0, (0, 1, 2))], [(1, (0, 1)), (2, (0,))]]),
    ],
)  # fmt: skip
def test_groups_are_partitioned_by_cost(groups, shares):
    """A rank pays once for the prompt of the completions that it has of a group."""
    found = partition([GroupCost(*group) for group in groups], 2)
    assert [[(part.group, part.completions) for part in share] for share in found] == shares


def test_shard_cuts_the_same_minibatches_for_any_number_of_ranks():
    costs = [GroupCost(1, [cost, cost + 1]) for cost in (5, 80, 20, 35, 60, 10, 15, 40)]
    alone = shard(costs, 2, 1, seed=3, step=4)
    both = shard(costs, 2, 2, seed=3, step=4)
    for minibatch in range(2):
        parts = both[0][minibatch] + both[1][minibatch]
        assert sorted({part.group for part in parts}) == [part.group for part in alone[0][minibatch]]
        assert sum(len(part.completions) for part in parts) == 8
        assert {part.completions for part in alone[0][minibatch]} == {(0, 1)}
