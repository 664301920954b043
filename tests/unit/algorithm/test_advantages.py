import numpy as np
import pytest

from areal_core.algorithm.advantages import (
    ADVANTAGES,
    advantages_of,
    batch_advantages,
    batch_token_advantages,
    discounted,
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    overlong_penalties,
)
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.errors import RewardError
from areal_core.types import PackedGroup, Return
from tests.support.records import packed

# Group 0: mean 1/4, population std sqrt(3)/4. Group 1 has no variance. The batch: mean 5/8, std sqrt(15)/8.
REWARDS = [[1, 0, 0, 0], [1, 1, 1, 1]]


def test_group_normalises_within_each_group():
    std = 3**0.5 / 4 + 1e-6
    expected = [[0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std], [0, 0, 0, 0]]
    np.testing.assert_allclose(group_advantages(REWARDS), expected, rtol=1e-12)


def test_batch_normalises_over_all_groups():
    std = 15**0.5 / 8 + 1e-6
    expected = [[0.375 / std, *[-0.625 / std] * 3], [0.375 / std] * 4]
    np.testing.assert_allclose(batch_advantages(REWARDS), expected, rtol=1e-12)


def test_batch_tokens_normalises_over_tokens():
    """Two right of 5,000 tokens, two wrong of 15,000: mean -1/2, variance 3/4."""
    rewards, lengths = [[1, -1], [-1, 1]], [[5000, 15000], [15000, 5000]]
    right, wrong = 1.5 / (0.75**0.5 + 1e-6), -0.5 / (0.75**0.5 + 1e-6)
    found = batch_token_advantages(rewards, lengths)
    np.testing.assert_allclose(found, [[right, wrong], [wrong, right]], rtol=1e-12)
    np.testing.assert_allclose((found * lengths).sum(), 0, atol=1e-9)
    np.testing.assert_allclose(batch_token_advantages(rewards, np.full((2, 2), 7)), batch_advantages(rewards))
    with_gap = batch_token_advantages([[1, -1, None], [-1, 1, None]], [[5000, 15000, 9], [15000, 5000, 9]])
    np.testing.assert_allclose(with_gap, np.insert(found, 2, 0.0, axis=1), rtol=1e-12)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    np.testing.assert_allclose(leave_one_out_advantages(REWARDS), [[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0]])
    np.testing.assert_allclose(leave_one_out_advantages([[1.0, 0.25]]), [[0.75, -0.75]])


def test_group_mean_does_not_scale():
    np.testing.assert_allclose(group_mean_advantages(REWARDS), [[0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0]])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_equal_rewards_give_exactly_nothing(kind: str):
    # The mean of ten times 0.1 is not 0.1 in floating point; a deviation of 1e-17 must not count.
    assert not ADVANTAGES[kind](np.full((3, 10), 0.1)).any()


def test_unusable_rewards_are_refused():
    with pytest.raises(RewardError, match="rewards: must be finite, got -inf"):
        batch_advantages([[-np.inf, 0.0]])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_without_a_reward_a_completion_is_left_out(kind: str):
    """The others have the advantages that they would have without it."""
    rewards = np.random.default_rng(0).normal(size=(3, 4))
    with_gaps = np.insert(rewards, 2, np.nan, axis=1)
    advantages = ADVANTAGES[kind](with_gaps)
    np.testing.assert_allclose(np.delete(advantages, 2, axis=1), ADVANTAGES[kind](rewards), rtol=1e-12)
    assert not advantages[:, 2].any()


@pytest.mark.parametrize("kind", ["group", "group_mean", "leave_one_out"])
def test_a_group_of_one_or_no_reward_has_no_advantage(kind: str):
    assert not ADVANTAGES[kind]([[None, 1.0, None], [None, None, None]]).any()


def test_length_costs_in_the_last_tokens_before_the_limit():
    # limit 20, cache 8: nothing up to 12, an eighth of the penalty for every token after it
    lengths = [[1, 12, 13, 14], [19, 20, 21, 100]]
    np.testing.assert_allclose(
        overlong_penalties(lengths, limit=20, cache=8, penalty=2.0), [[0, 0, -0.25, -0.5], [-1.75, -2, -2, -2]]
    )


def group(rewards, lengths, **fields) -> PackedGroup:
    return PackedGroup(**packed(lengths, **{"rewards": rewards} | fields))


def test_rewards_are_shaped_before_advantages():
    shaped = AlgorithmConfig(advantage="group_mean", overlong_cache=4, overlong_penalty=0.5)
    groups = [group((1, 1), (16, 18)), group((1, 0), (20, 20))]
    # rewards 1, 1 - 0.25 and 1 - 0.5, 0 - 0.5
    first, second = advantages_of(groups, shaped, 20)
    assert first.advantages.tolist() == [0.125, -0.125]
    assert second.advantages.tolist() == [0.5, -0.5]
    assert (first.sequences.tolist(), first.tokens.tolist()) == ([0, 1], [16, 18])
    plain, _ = advantages_of(groups, AlgorithmConfig(advantage="group_mean"), 20)
    assert plain.moves() == [False, False]


# Two rollouts, of two sequences and of one.
BRANCHED = {"rollout_of": (0, 0, 1), "truncated": (False, False), "loss_tokens": (5, 4)}


def test_a_rollout_has_its_advantage_in_all_of_its_sequences():
    """Its length penalty is that of the longest, and means count it once. Over tokens it counts by those of both."""
    one = group((1.0, 0.0), (2, 3, 4), **BRANCHED)
    [credit] = advantages_of([one], AlgorithmConfig(advantage="group_mean"), 8)
    assert credit.advantages.tolist() == [0.5, 0.5, -0.5]
    shaped = AlgorithmConfig(advantage="group_mean", overlong_cache=4, overlong_penalty=1.0)
    [credit] = advantages_of([one], shaped, 4)  # 1 - 3 / 4 and 0 - 1
    assert credit.advantages.tolist() == [0.625, 0.625, -0.625]
    [credit] = advantages_of([one], AlgorithmConfig(advantage="batch_tokens"), 8)
    mean = 5 / 9
    assert credit.advantages == pytest.approx(
        np.array([1 - mean, 1 - mean, -mean]) / np.sqrt(mean * (1 - mean)), rel=1e-5
    )


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # The mean of (3 + 1) / 2 and 0 is 1; without its own rollout it is 0, and 2.
        ("group_mean", [2.0, 0.0, -1.0]),
        ("leave_one_out", [3.0, 1.0, -2.0]),
        # The variance is (4 / 2 + 0 / 2 + 1) / 2.
        ("group", [2 / 1.5**0.5, 0.0, -1 / 1.5**0.5]),
        ("batch", [2 / 1.5**0.5, 0.0, -1 / 1.5**0.5]),
    ],
)
def test_parts_with_returns_of_their_own_share_the_weight_of_their_rollout(advantage, expected):
    returns = (Return(0, 1, 3.0), Return(0, 2, 1.0), Return(1, 4, 0.0))
    one = group((1.0, 0.0), (2, 4), returns=returns)
    [credit] = advantages_of([one], AlgorithmConfig(advantage=advantage), 8)
    assert credit.advantages == pytest.approx(expected, rel=1e-5)
    assert (credit.sequences.tolist(), credit.tokens.tolist()) == ([0, 0, 1], [1, 1, 4])
    assert credit.moves() == [True, True]
    assert one.compared == {3.0, 1.0, 0.0}


def test_later_rewards_are_discounted():
    assert discounted([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert discounted([1.0, 0.0, 4.0], 0.0) == [1.0, 0.0, 4.0]
