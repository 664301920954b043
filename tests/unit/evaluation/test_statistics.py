"""Figures equal those by hand and by brute force; intervals hold the truth, and tests err, as often as they should.

Simulations have fixed seeds. The cases of coverage here are some of the worst and some usual ones among those with a
mean accuracy from 0.1 to 0.9. What `benchmarks.interval_coverage` found of all cases, those that fall short included,
stands in docs/evaluation.md.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from areal_core.evaluation.statistics import (
    Difference,
    difference,
    estimate,
    majority_at_k,
    pass_at_k,
    sign_flip_p_value,
)


def verdicts(right: int, wrong: int) -> np.ndarray:
    return np.array([1.0] * right + [0.0] * wrong)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one() -> None:
    for n, k in itertools.product(range(1, 8), range(1, 8)):
        for c in range(n + 1 if k <= n else 0):
            draws = [any(draw) for draw in itertools.combinations([True] * c + [False] * (n - c), k)]
            assert pass_at_k(np.array([c]), np.array([n]), k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: estimate(np.array([])), "from 0 to 1"),
        (lambda: estimate(np.array([0.5, 1.5])), "from 0 to 1"),
        (lambda: estimate(np.array([0.5, np.nan])), "from 0 to 1"),
        (lambda: difference(verdicts(1, 2), verdicts(1, 1)), "values of the same prompts, got 3 and 2"),
    ],
)
def test_values_without_a_meaning_are_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize(
    ("answers", "right"), [("aaabbcd-", "a"), ("aabbccdd", "b"), ("aabbbcc--", "ac"), ("aaaaabbb", "b")]
)
def test_majority_over_all_draws(answers: str, right: str) -> None:
    given = [None if answer == "-" else answer for answer in answers]
    for k in range(1, len(given) + 1):
        shares = [share_that_is_right(draw, right) for draw in itertools.combinations(given, k)]
        assert majority_at_k(given, set(right), k) == pytest.approx(sum(shares) / len(shares), abs=1e-12)
        assert majority_at_k(given[::-1], set(right), k) == majority_at_k(given, set(right), k)


def share_that_is_right(draw: tuple[str | None, ...], right: str) -> float:
    votes = [answer for answer in draw if answer is not None]
    most = {answer for answer in votes if votes.count(answer) == max(map(votes.count, votes))}
    return len(most & set(right)) / len(most) if most else 0.0


@pytest.mark.parametrize(
    ("right", "wrong", "low", "high"),
    [(7, 3, 0.39678, 0.89221), (0, 30, 0.0, 3.84146 / (30 + 3.84146)), (30, 0, 30 / (30 + 3.84146), 1.0)],
)
def test_wilson_by_hand(right: int, wrong: int, low: float, high: float) -> None:
    found = estimate(verdicts(right, wrong))
    assert found.value == right / (right + wrong)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-5)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("solved", [0, 1, 31])
def test_hardly_anything_solved_says_no_more_than_nothing_solved(solved: int) -> None:
    """One completion of 960 shows no spread: t alone would give an interval that ends below 0.01."""
    values = pass_at_k(np.array([solved] + [0] * 29), np.full(30, 32), 1)
    nothing, everything = estimate(verdicts(0, 30)), estimate(verdicts(30, 0))
    assert estimate(values).high >= nothing.high > 0.1
    assert estimate(1 - values).low <= everything.low + 1e-12


def of_verdicts(won: int, lost: int, both: int) -> Difference:
    values = verdicts(won + both, lost)
    return difference(values, np.array([0.0] * won + [1.0] * (both + lost)))


@pytest.mark.parametrize(
    ("won", "lost", "by_hand"),
    [
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (0, 0, 1.0),
        (1050, 950, 2 * sum(math.comb(2000, lost) for lost in range(951)) / 2**2000),
    ],
)
def test_verdicts_are_compared_by_mcnemars_exact_test(won: int, lost: int, by_hand: float) -> None:
    found = of_verdicts(won, lost, 20)
    assert found.p_value == pytest.approx(by_hand, rel=1e-9)
    assert found.value == pytest.approx((won - lost) / (won + lost + 20))


def test_interval_of_bonett_and_price_by_hand() -> None:
    found = of_verdicts(8, 2, 20)
    half = 1.959964 * math.sqrt((12 / 32 - (6 / 32) ** 2) / 32)
    assert (found.low, found.high) == pytest.approx((6 / 32 - half, 6 / 32 + half), abs=1e-6)


def test_no_difference_on_any_prompt_is_no_proof_of_none() -> None:
    half = 1.959964 * math.sqrt(2 / 32 / 32)
    values = np.full(30, 0.25)
    found = difference(values, values)
    assert (found.value, found.p_value) == (0.0, 1.0)
    assert (found.low, found.high) == pytest.approx((-half, half), abs=1e-6)
    all_won, all_lost = of_verdicts(30, 0, 0), of_verdicts(0, 30, 0)
    assert (all_won.high, all_lost.low) == (1.0, -1.0)


def test_interval_of_paired_t_by_hand() -> None:
    found = difference(np.array([0.5, 0.7, 0.6, 0.9, 0.8]), np.array([0.4, 0.7, 0.4, 0.6, 0.4]))
    half = 2.776 * math.sqrt(0.025 / 5)  # of 0.1, 0, 0.2, 0.3, 0.4
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-3)
    assert found.p_value == pytest.approx(4 / 32)  # all pluses or all minuses, whatever the sign of the 0


def test_sign_flips_by_brute_force() -> None:
    rng = np.random.default_rng(5)
    for differences in (rng.normal(0.3, 1, 10), rng.integers(-4, 6, 10) / 3, rng.integers(-4, 6, 10) / 8):
        signs = np.array(list(itertools.product([-1, 1], repeat=10)))
        expected = np.mean(np.abs(signs @ np.abs(differences)) >= abs(differences.sum()) - 1e-9)
        assert sign_flip_p_value(differences) == pytest.approx(expected, rel=1e-12)


def test_sign_flips_that_are_too_many_are_drawn() -> None:
    """Sixty unequal differences: the sum of flips is close to normal."""
    rng = np.random.default_rng(8)
    differences = rng.normal(0.3, 1, 60)
    normal = math.erfc(abs(differences.sum()) / math.sqrt(2 * np.square(differences).sum()))
    assert 0.02 < normal < 0.5
    assert sign_flip_p_value(differences) == pytest.approx(normal, abs=0.02)  # the draws' standard error is below 0.005
    assert sign_flip_p_value(differences) == sign_flip_p_value(differences[::-1])
    assert sign_flip_p_value(np.abs(differences)) == 1 / 10_001
