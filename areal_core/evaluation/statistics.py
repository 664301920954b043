"""Statistics of completions on a benchmark: pass@k, maj@k, confidence intervals, paired comparison.

Every figure is a mean over prompts of one value per prompt, from 0 to 1. The value is the share of correct completions
(pass@1; greedy accuracy for one greedy completion), pass@k, or maj@k. Completions of one prompt are correlated, so the
sample size is the number of prompts. An interval is for the mean over all prompts of their kind. More completions per
prompt do not add prompts. docs/evaluation.md has the measured coverage of the intervals.

Axes: P prompts, n completions of a prompt that have a result; the caller drops those without one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
IntArray = NDArray[np.integer]

CONFIDENCE = 0.95  # confidence level of intervals
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_OUTCOMES = 2**20  # most outcomes of sign flips to enumerate; above, flips are drawn
_DRAWS = 10_000  # the standard error of a p-value of 0.05 is 0.002
_TIE = 1e-9  # sums of differences closer than this are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts, and a confidence interval for the mean over all prompts of their kind."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Estimate):
    """A paired difference of means over prompts, its interval, and a test of the null hypothesis."""

    p_value: float  # two-sided, sign-flip; exact McNemar if values are 0 or 1


def pass_at_k(correct: IntArray, completions: IntArray, k: int) -> Float64Array:
    """The probability [P] that k of a prompt's n completions hold a correct one.

    Draws are without replacement: 1 - C(n - c, k) / C(n, k), unbiased for k fresh completions (Chen et al., 2021, arXiv
    2107.03374, Eq. 1). Computed in integers, so there is no cancellation, and equal probabilities are equal. `correct`
    [P] holds c, `completions` [P] n. k is at most the smallest n.
    """
    values: list[float] = []
    for c, n in zip(correct.tolist(), completions.tolist(), strict=True):
        ways = math.comb(n, k)
        values.append((ways - math.comb(n - c, k)) / ways)
    return np.array(values)


def majority_at_k(answers: Sequence[str | None], correct: Collection[str], k: int) -> float:
    """The expected correctness (maj@k) of the most frequent answer among k of one prompt's n completions.

    Exact over all draws of k without replacement, for n up to 1,000. For k = n it is the single vote of all completions
    (self-consistency: Wang et al., 2022, arXiv 2203.11171). Equal `answers` [n] vote together, and `correct` holds the
    correct ones. A tie counts by the share of its answers that are correct. A completion without an answer (None) is
    drawn but doesn't vote; without votes the result is incorrect. k is from 1 to n.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    won = 0.0
    for answer in sorted(votes.keys() & set(correct)):
        others = [count for other, count in votes.items() if other != answer]
        for top in range(1, min(k, votes[answer]) + 1):
            ways = _ways(others, silent, top, k - top)
            won += math.comb(votes[answer], top) * float(ways @ (1.0 / np.arange(1, len(ways) + 1)))
    return won / math.comb(len(answers), k)


def _ways(others: Sequence[int], silent: int, top: int, draws: int) -> Float64Array:
    """Ways [ties + 1] to draw `draws` completions so that no other answer exceeds `top` votes.
    Index i counts the draws in which i other answers have exactly `top` votes."""
    table = np.zeros((draws // top + 1, draws + 1))  # [ties, drawn so far]
    table[0, 0] = 1.0
    for count in others:
        longer = np.zeros_like(table)
        for drawn in range(min(count, top, draws) + 1):
            ties = int(drawn == top)
            longer[ties:, drawn:] += math.comb(count, drawn) * table[: len(table) - ties, : draws + 1 - drawn]
        table = longer
    return table @ np.array([float(math.comb(silent, draws - drawn)) for drawn in range(draws + 1)])


def estimate(values: Float64Array) -> Estimate:
    """The mean of one value per prompt, [P] from 0 to 1, with its confidence interval.

    If values are 0 or 1, Wilson's interval (1927). Otherwise Student's t over prompts on the logit scale, as surveys do
    for means over clusters (`xlogit` of R's survey::svyciprop). That interval stays within 0 and 1, and reaches further
    on the side away from the nearer bound. If the values are all equal, or sum to less than one solved or one failed
    prompt, their spread is unknown. They are then treated as 0 or 1, which have the largest spread for a given mean.
    Raises ValueError without values, or for one outside 0 to 1.
    """
    _check_values(values)
    prompts, mean = len(values), float(values.mean())
    spread_unknown = np.ptp(values) == 0 or prompts * min(mean, 1 - mean) < 1
    if spread_unknown or np.isin(values, (0.0, 1.0)).all():
        return _wilson(mean, prompts)
    from scipy.special import expit  # a third of a second, which a launcher does without

    logit = math.log(mean / (1 - mean))
    half = _half_width(values) / (mean * (1 - mean))
    return Estimate(value=mean, low=float(expit(logit - half)), high=float(expit(logit + half)))


def difference(values: Float64Array, reference: Float64Array) -> Difference:
    """The mean of value - reference over the same prompts, [P] from 0 to 1, with interval and p-value.

    If differences are -1, 0 or 1, as for 0/1 values: Wald's interval with one more prompt won and one more lost (Bonett
    and Price, 2012, J. Educ. Behav. Stat. 37:479). Otherwise Student's t over prompts. The p-value is that of
    `sign_flip_p_value`, and may disagree with an interval that ends near 0. Raises ValueError if the lengths differ,
    and as `estimate` does.
    """
    if len(values) != len(reference):
        raise ValueError(f"both models need values of the same prompts, got {len(values)} and {len(reference)} values")
    _check_values(values)
    _check_values(reference)
    differences = values - reference
    prompts, mean = len(differences), float(differences.mean())
    if np.ptp(differences) == 0 or np.isin(differences, (-1.0, 0.0, 1.0)).all():
        centre = float(differences.sum()) / (prompts + 2)
        squares = (float(np.square(differences).sum()) + 2) / (prompts + 2)
        half = _Z * math.sqrt((squares - centre**2) / (prompts + 2))
    else:
        centre, half = mean, _half_width(differences)
    return Difference(
        value=mean,
        low=max(-1.0, centre - half),
        high=min(1.0, centre + half),
        p_value=sign_flip_p_value(differences),
    )


def sign_flip_p_value(differences: Float64Array) -> float:
    """The probability that the sum of `differences` [P] is as far from 0 under fair random signs.

    The null hypothesis is that a prompt's completions do not depend on the checkpoint (Fisher, The Design of
    Experiments, 1935, section 21). For 0/1 values this is the exact, binomial form of McNemar's test. Exact up to
    `_OUTCOMES` sign outcomes, with equal differences grouped. Above, it uses `_DRAWS` draws with a fixed seed, counting
    the observed outcome (Phipson and Smyth, 2010, arXiv 1603.05766).
    """
    sizes, counts = np.unique(np.abs(differences), return_counts=True)
    least = abs(float(differences.sum())) - _TIE
    sums, chances = np.zeros(1), np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        if size == 0:
            continue
        if len(sums) * (count + 1) > _OUTCOMES:
            heads = np.random.default_rng(0).binomial(counts, 0.5, size=(_DRAWS, len(counts)))
            return (1 + int((np.abs((2 * heads - counts) @ sizes) >= least).sum())) / (1 + _DRAWS)
        longer = np.add.outer(sums, size * (2 * np.arange(count + 1) - count)).ravel()
        _, first, same = np.unique(longer.round(9), return_index=True, return_inverse=True)
        sums, chances = longer[first], np.bincount(same, np.outer(chances, _coins(count)).ravel())
    return min(1.0, float(chances[np.abs(sums) >= least].sum()))


def _coins(count: int) -> Float64Array:
    """The probability [count + 1] of each number of heads among `count` fair coins."""
    log_factorial = np.array([math.lgamma(heads + 1) for heads in range(count + 1)])
    return np.exp(log_factorial[-1] - log_factorial - log_factorial[::-1] - count * math.log(2))


def _wilson(mean: float, prompts: int) -> Estimate:
    shrink = 1 / (1 + _Z**2 / prompts)
    centre = shrink * (mean + _Z**2 / (2 * prompts))
    half = shrink * _Z * math.sqrt(mean * (1 - mean) / prompts + _Z**2 / (4 * prompts**2))
    # The bounds are exact for a mean of 0 or 1, apart from rounding.
    return Estimate(value=mean, low=min(mean, max(0.0, centre - half)), high=max(mean, min(1.0, centre + half)))


def _half_width(values: Float64Array) -> float:
    """Half the width of Student's t interval for the mean of values [P], P at least 2."""
    from scipy.special import stdtrit  # as above

    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def _check_values(values: Float64Array) -> None:
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"a mean over prompts needs values from 0 to 1, got {values}")
