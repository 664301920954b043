"""Confidence intervals of medians from a handful of seeds, without assuming a distribution.

The interval between the k-th lowest and the k-th highest of n independent values holds the median of whatever they were
drawn from with probability P(k <= Binomial(n, 1/2) <= n - k) = 1 - 2 P(Binomial(n, 1/2) < k), for any continuous
distribution (David and Nagaraja, Order Statistics, section 7.1). Three seeds can't give 95 %: their whole range has
75 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95  # of intervals, where there are values enough: six

Verdict = Literal["higher", "lower", "no difference"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A sample's median, and an interval for the true one."""

    median: float
    low: float
    high: float
    coverage: float  # probability that [low, high] holds the true median
    n: int  # values


def median_interval(values: Iterable[float]) -> Interval:
    """The narrowest symmetric interval of order statistics whose coverage is at least `CONFIDENCE`.

    Where even the whole range has less, it is the whole range, with the coverage that it has. Raises ValueError without
    values, or for one that is not finite.
    """
    ordered = sorted(values)
    n = len(ordered)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise ValueError(f"a median needs finite values, got {ordered}")
    k = max((k for k in range(1, (n + 1) // 2 + 1) if coverage(n, k) >= CONFIDENCE), default=1)
    return Interval(
        median=statistics.median(ordered), low=ordered[k - 1], high=ordered[n - k], coverage=coverage(n, k), n=n
    )


def paired_ratio(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval:
    """value / reference of each seed that has both, as `median_interval` puts it. Raises ValueError where no seed has
    both, ZeroDivisionError where a reference is 0."""
    return median_interval(values[seed] / reference[seed] for seed in values.keys() & reference.keys())


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval:
    """value - reference of each seed that has both. Raises ValueError where no seed has both."""
    return median_interval(values[seed] - reference[seed] for seed in values.keys() & reference.keys())


def verdict(interval: Interval, neutral: float) -> Verdict:
    """What an interval of ratios (`neutral` 1) or of differences (0) says. One value alone says nothing."""
    if interval.n == 1 or interval.low <= neutral <= interval.high:
        return "no difference"
    return "higher" if interval.low > neutral else "lower"


def coverage(n: int, k: int = 1) -> float:
    """Probability that the median lies between the k-th lowest and the k-th highest of n values."""
    return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / 2**n
