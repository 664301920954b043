import pytest

from areal_core.errors import ConfigError
from areal_core.training.batching.partition import (
    GroupCost,
    Part,
    allocate,
    allocate_groups,
    cut_minibatches,
    partition,
    shard,
)


def test_algorithm_1_by_hand():
    # Longest first: 9, 7, 5, 4, 3, 2 in capacity 12 with at least two micro-batches.
    # 9 and 7 open one each; 5 fits only beside 7 (12); 4 fits nowhere and opens the third; 3 fits beside 9 and beside
    # 4, which hold one sequence each: the first; 2 fits only beside 4.
    assert allocate([4, 9, 2, 7, 3, 5], 12, 2) == [[1, 4], [3, 5], [0, 2]]


def test_the_microbatch_with_the_fewest_sequences_is_preferred():
    # 8 and 6 don't fit together, 3 fits beside 6 only; both then have room for 1, and 8 is alone.
    assert allocate([8, 6, 3, 1], 10) == [[0, 3], [1, 2]]


def test_min_microbatches_opens_more_than_capacity_asks_for():
    assert allocate([2, 2, 2, 2], 100, 3) == [[0, 3], [1], [2]]
    assert allocate([2, 2], 100, 5) == [[0], [1]]  # never an empty one


def test_nothing_to_allocate():
    assert allocate([], 10) == []


def test_a_sequence_over_capacity_is_refused():
    with pytest.raises(
        ConfigError, match=r"training\.microbatch_tokens: must hold the longest sequence, 11 tokens, got 10"
    ):
        allocate([3, 11], 10)


def test_a_completion_over_capacity_with_its_prompt_is_refused():
    with pytest.raises(ConfigError, match="must hold the longest sequence, 11 tokens, got 10"):
        allocate_groups([5], [[2, 6]], 10)


def test_completions_fill_an_item_to_the_last_token_of_its_room():
    """Of the six tokens that the prompt leaves, the longest takes four and another the last two."""
    assert allocate_groups([4], [[1, 4, 2]], 10) == [[[(0, 1), (0, 2)]], [[(0, 0)]]]


def test_minibatches_are_keyed_by_seed_and_step():
    # Fixed values: the order is part of what a resumed run must reproduce.
    assert cut_minibatches(8, 3, seed=1, step=1) == [[3, 2], [4, 6, 1], [5, 7, 0]]
    assert cut_minibatches(8, 3, seed=1, step=2) != cut_minibatches(8, 3, seed=1, step=1)
    assert cut_minibatches(8, 3, seed=2, step=1) != cut_minibatches(8, 3, seed=1, step=1)


@pytest.mark.parametrize("count", [0, 5])
def test_impossible_minibatches_are_refused(count: int):
    with pytest.raises(ConfigError, match=r"training\.minibatches: must be between 1 and the groups in a batch \(4\)"):
        cut_minibatches(4, count, seed=0, step=0)


def test_partition_by_hand():
    # Of single completions: 9 -> rank 0, 7 -> 1, 5 -> 1 (12), 4 -> 0 (13), 3 -> 1 (15), 2 -> 0 (15)
    costs = [GroupCost(0, [cost]) for cost in (4, 9, 2, 7, 3, 5)]
    shares = partition(costs, 2)
    assert [[part.group for part in share] for share in shares] == [[0, 1, 2], [3, 4, 5]]
    assert {part.completions for share in shares for part in share} == {(0,)}


def test_groups_are_cut_no_further_than_balance_gains():
    assert partition([GroupCost(0, [8, 2]), GroupCost(0, [3, 7])], 2) == [[Part(0, (0, 1))], [Part(1, (0, 1))]]
    # Halves, each the dearest first to the cheaper one: 8 | 7, 3 -> 7, 2 -> 8.
    assert partition([GroupCost(0, [8, 7, 2, 3])], 2) == [[Part(0, (0, 2))], [Part(0, (1, 3))]]


def test_a_prompt_that_costs_more_than_balance_gains_keeps_its_group_together():
    # Whole, 112 and 104; halved, each rank pays for both prompts.
    costs = [GroupCost(100, [3, 3, 3, 3]), GroupCost(100, [2, 2])]
    assert partition(costs, 2) == [[Part(0, (0, 1, 2, 3))], [Part(1, (0, 1))]]
    assert partition([GroupCost(2, [30, 30])], 2) == [[Part(0, (0,))], [Part(0, (1,))]]


def test_a_rank_pays_for_a_prompt_once():
    """Whole, 90 and 60. In halves 10 + 40 on one rank; on the other 10 + 40 as well, then one half of 60 each."""
    costs = [GroupCost(10, [20, 20, 20, 20]), GroupCost(0, [30, 30])]
    assert partition(costs, 2) == [[Part(0, (0, 2)), Part(1, (0,))], [Part(0, (1, 3)), Part(1, (1,))]]


def test_completions_that_cost_nothing_go_with_their_group_or_where_the_fewest_are():
    costs = [GroupCost(5, [9, 0, 0]), GroupCost(5, [0, 0]), GroupCost(5, [0])]
    assert partition(costs, 2) == [[Part(0, (0, 1, 2))], [Part(1, (0, 1)), Part(2, (0,))]]


def test_shard_cuts_the_same_minibatches_for_any_number_of_ranks():
    costs = [GroupCost(1, [cost, cost + 1]) for cost in (5, 80, 20, 35, 60, 10, 15, 40)]
    alone = shard(costs, 2, 1, seed=3, step=4)
    both = shard(costs, 2, 2, seed=3, step=4)
    for minibatch in range(2):
        parts = both[0][minibatch] + both[1][minibatch]
        assert sorted({part.group for part in parts}) == [part.group for part in alone[0][minibatch]]
        assert sum(len(part.completions) for part in parts) == 8
        assert {part.completions for part in alone[0][minibatch]} == {(0, 1)}
