"""Intervals have the coverage that they claim, ratios are paired by seed, and verdicts hold at the edges."""

import random
import statistics

import pytest

from flows.comparison.intervals import (
    Interval,
    median_interval,
    paired_difference,
    paired_ratio,
    verdict,
)


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


@pytest.mark.parametrize(("n", "coverage"), [(3, 0.75), (6, 0.96875), (10, 0.978515625)])
def test_coverage_is_that_of_samples_from_a_skewed_distribution(n: int, coverage: float) -> None:
    rng = random.Random(n)
    true_median, samples = 2.0**0.5, 4000  # of 1 / sqrt(U), whose mean is 2
    held = sum(
        interval.low <= true_median <= interval.high
        for interval in (median_interval([rng.random() ** -0.5 for _ in range(n)]) for _ in range(samples))
    )
    assert held / samples == pytest.approx(coverage, abs=4 * (coverage * (1 - coverage) / samples) ** 0.5)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_nothing_and_what_is_not_finite_has_no_median(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        median_interval(values)


def test_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    reference = {1: 10.0, 2: 100.0, 3: 20.0}
    values = {1: 20.0, 2: 110.0, 3: 30.0}  # 2, 1.1, 1.5
    interval = paired_ratio(values, reference)
    assert (interval.median, interval.low, interval.high, interval.n) == (1.5, 1.1, 2.0, 3)
    assert interval.coverage == 0.75
    faster_once = {**values, 1: 40.0}
    assert statistics.median(faster_once.values()) / statistics.median(reference.values()) == 2.0
    assert paired_ratio(faster_once, reference).median == 1.5


def test_seeds_without_a_partner_are_left_out_and_counted() -> None:
    interval = paired_difference({1: 5.0, 2: 7.0, 4: 1000.0}, {1: 4.0, 2: 4.0, 3: -1000.0})
    assert (interval.median, interval.low, interval.high, interval.n, interval.coverage) == (2.0, 1.0, 3.0, 2, 0.5)


@pytest.mark.parametrize("compare", [paired_ratio, paired_difference])
def test_no_common_seed_is_an_error(compare) -> None:
    with pytest.raises(ValueError, match="no seed"):
        compare({1: 1.0}, {2: 1.0})


def test_no_ratio_to_zero() -> None:
    with pytest.raises(ValueError, match="seed 2 is 0"):
        paired_ratio({1: 1.0, 2: 1.0}, {1: 1.0, 2: 0.0})


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
    assert verdict(Interval(median=(low + high) / 2, low=low, high=high, coverage=0.75, n=3), neutral) == expected


def test_one_value_says_nothing() -> None:
    assert verdict(median_interval([2.0]), 1.0) == "no difference"
