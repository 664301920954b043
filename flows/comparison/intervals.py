"""Confidence intervals of medians from a few seeds, without assuming a distribution.

Take n independent values of any continuous distribution. The interval from the k-th lowest to the k-th highest value
contains the true median with probability P(k <= Binomial(n, 1/2) <= n - k) = 1 - 2 P(Binomial(n, 1/2) < k). Source:
David and Nagaraja, Order Statistics, section 7.1. Three seeds can't reach 95 %: their whole range has 75 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95  # coverage of an interval; needs at least six values

Verdict = Literal["higher", "lower", "no difference"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A sample's median, and a confidence interval for the true median."""

    median: float
    low: float
    high: float
    coverage: float  # probability that [low, high] contains the true median
    n: int  # number of values


def median_interval(values: Iterable[float]) -> Interval:
    """The narrowest symmetric interval of order statistics whose coverage is at least `CONFIDENCE`.

    If the whole range has less coverage, the result is the whole range with its coverage. Raises ValueError for no
    values or for a value that is not finite."""
    ordered = sorted(values)
    n = len(ordered)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise ValueError(f"a median needs finite values, got {ordered}")
    k = max((k for k in range(1, (n + 1) // 2 + 1) if coverage(n, k) >= CONFIDENCE), default=1)
    return Interval(
        median=statistics.median(ordered), low=ordered[k - 1], high=ordered[n - k], coverage=coverage(n, k), n=n
    )


def paired_ratio(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval:
    """Interval of value / reference over the seeds that have both.
    Raises ValueError if no seed has both, ZeroDivisionError if a reference is 0."""
    return median_interval(values[seed] / reference[seed] for seed in values.keys() & reference.keys())


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval:
    """Interval of value - reference over the seeds that have both. Raises ValueError if no seed has both."""
    return median_interval(values[seed] - reference[seed] for seed in values.keys() & reference.keys())


def verdict(interval: Interval, neutral: float) -> Verdict:
    """Compare an interval of ratios (`neutral` 1) or differences (0) with no effect.
    A single value gives no difference."""
    if interval.n == 1 or interval.low <= neutral <= interval.high:
        return "no difference"
    return "higher" if interval.low > neutral else "lower"


def coverage(n: int, k: int = 1) -> float:
    """Probability that the true median lies between the k-th lowest and the k-th highest of n values."""
    return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / 2**n
