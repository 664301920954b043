"""Intervals have the coverage that they claim, ratios are paired by seed, and verdicts hold at the edges."""

import random
from collections.abc import Callable

import pytest

from flows.comparison.intervals import Interval, median_interval, paired_difference, paired_ratio, verdict


@pytest.mark.parametrize(
    ("n", "coverage", "low", "high"),
    [
        (1, 0.0, 1, 1),
        (2, 0.5, 1, 2),
        (3, 0.75, 1, 3),
        (5, 0.9375, 1, 5),
        (6, 0.96875, 1, 6),
        (8, 0.9921875, 1, 8),
        (9, 0.9609375, 2, 8),
        (10, 1 - 22 / 1024, 2, 9),
        (20, 1 - 2 * 21700 / 2**20, 6, 15),  # 1 + 20 + 190 + 1140 + 4845 + 15504 of 2^20 below the 6th
    ],
)
def test_narrowest_interval_that_covers_enough_else_the_whole_range(n: int, coverage: float, low: int, high: int):
    values = list(range(1, n + 1))
    random.Random(n).shuffle(values)
    interval = median_interval(values)
    assert (interval.median, interval.low, interval.high, interval.n) == ((n + 1) / 2, low, high, n)
    assert interval.coverage == pytest.approx(coverage, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: median_interval([]), "finite"),
        (lambda: median_interval([1.0, float("nan")]), "finite"),
        (lambda: median_interval([float("inf")]), "finite"),
        (lambda: paired_ratio({1: 1.0}, {2: 1.0}), "no seed"),
        (lambda: paired_difference({1: 1.0}, {2: 1.0}), "no seed"),
        (lambda: paired_ratio({1: 1.0, 2: 1.0}, {1: 1.0, 2: 0.0}), "seed 2 is 0"),
    ],
)
def test_values_without_an_interval_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    reference = {1: 10.0, 2: 100.0, 3: 20.0}
    values = {1: 20.0, 2: 110.0, 3: 30.0}  # 2, 1.1, 1.5
    interval = paired_ratio(values, reference)
    assert (interval.median, interval.low, interval.high, interval.n) == (1.5, 1.1, 2.0, 3)
    assert interval.coverage == 0.75
    assert paired_ratio({**values, 1: 40.0}, reference).median == 1.5  # the ratio of medians is 2


def test_seeds_without_a_partner_are_left_out_and_counted() -> None:
    interval = paired_difference({1: 5.0, 2: 7.0, 4: 1000.0}, {1: 4.0, 2: 4.0, 3: -1000.0})
    assert (interval.median, interval.low, interval.high, interval.n, interval.coverage) == (2.0, 1.0, 3.0, 2, 0.5)


@pytest.mark.parametrize(
    ("low", "high", "neutral", "expected"),
    [
        (1.01, 1.5, 1.0, "higher"),
        (1.0, 1.5, 1.0, "no difference"),
        (0.5, 0.99, 1.0, "lower"),
        (0.0, 0.0, 0.0, "no difference"),
        (-0.002, -0.001, 0.0, "lower"),
    ],
)
def test_no_difference_where_the_neutral_value_lies_inside_or_on_the_edge(
    low: float, high: float, neutral: float, expected: str
) -> None:
    assert verdict(median_interval([2.0]), 1.0) == "no difference"  # one value says nothing
    assert verdict(Interval(median=(low + high) / 2, low=low, high=high, coverage=0.75, n=3), neutral) == expected
