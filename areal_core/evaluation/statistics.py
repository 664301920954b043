"""What completions of a benchmark's prompts say about a policy: pass@k, maj@k, intervals, and paired comparison.

Every figure is a mean over prompts of one value a prompt, from 0 to 1: its share of correct completions (pass@1; of one
greedy completion each, greedy accuracy), its pass@k, its maj@k. Completions of one prompt resemble each other, so it is
prompts that count: an interval is for the mean over all prompts of their kind, and thirty prompts stay thirty, however
many completions they have. What the intervals were measured to cover stands in docs/evaluation.md.

Axes: P prompts, n completions of a prompt that have a result; those without one are left out before.
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

CONFIDENCE = 0.95  # of intervals
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_OUTCOMES = 2**20  # of sign flips that are enumerated; beyond, flips are drawn
_DRAWS = 10_000  # the standard error of a p-value of 0.05 is 0.002
_TIE = 1e-9  # sums of differences closer than this are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts, and an interval for that over all prompts of their kind."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Estimate):
    """A mean over prompts minus another over the same ones, an interval, and a test that there is none."""

    p_value: float  # two-sided, sign-flip; exact McNemar where values are 0 or 1


def pass_at_k(correct: IntArray, completions: IntArray, k: int) -> Float64Array:
    """The chance [P] that k of a prompt's n completions, drawn without replacement, hold a correct one.

    1 - C(n - c, k) / C(n, k), unbiased for k fresh completions (Chen et al., 2021, arXiv 2107.03374, Eq. 1); in whole
    numbers, so that nothing cancels and equal chances are equal. `correct` [P] holds c, `completions` [P] n. k is
    at most the least n.
    """
    values: list[float] = []
    for c, n in zip(correct.tolist(), completions.tolist(), strict=True):
        ways = math.comb(n, k)
        values.append((ways - math.comb(n - c, k)) / ways)
    return np.array(values)


def majority_at_k(answers: Sequence[str | None], right: Collection[str], k: int) -> float:
    """The expected correctness (maj@k) of the most frequent answer among k of one prompt's n completions.

    Over all draws of k without replacement, exactly, for n up to 1,000; for k = n it is the one vote of all
    (self-consistency: Wang et al., 2022, arXiv 2203.11171). Equal `answers` [n] vote together, and `right` are those
    that are correct. A tie counts by the share of its answers that are right. A completion without an answer (None) is
    drawn but doesn't vote; where nobody votes, nothing is right. k is from 1 to n.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    won = 0.0
    for answer in sorted(votes.keys() & set(right)):
        others = [count for other, count in votes.items() if other != answer]
        for top in range(1, min(k, votes[answer]) + 1):
            ways = _ways(others, silent, top, k - top)
            won += math.comb(votes[answer], top) * float(ways @ (1.0 / np.arange(1, len(ways) + 1)))
    return won / math.comb(len(answers), k)


def _ways(others: Sequence[int], silent: int, top: int, draws: int) -> Float64Array:
    """The ways [ties + 1] to draw `draws` completions such that no other answer has more than `top` votes, by the
    number of those that have as many."""
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
    """The mean of one value a prompt, [P] from 0 to 1, with its interval.

    Where values are 0 or 1, Wilson's (1927). Else Student's t over prompts, on the scale of logit(mean), as surveys
    have it for means over clusters (`xlogit` of R's survey::svyciprop): it stays within 0 and 1, and reaches further
    away from whichever is near. Values that don't show how they spread, because they are all the same or add up to less
    than one prompt solved or one failed, are taken for verdicts: of one mean, none spread more. Raises ValueError
    without values, or for one that is not from 0 to 1.
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
    """The mean of value - reference of the same prompts, both [P] from 0 to 1, with its interval and its p-value.

    Where differences are -1, 0 or 1, as those of verdicts are, Wald's interval with one more prompt won and one more
    lost (Bonett and Price, 2012, J. Educ. Behav. Stat. 37:479); else Student's t over prompts. The test is
    `sign_flip_p_value`'s, of its own, and may disagree with an interval that ends near 0. Raises ValueError where the
    two don't match, and as `estimate`.
    """
    if len(values) != len(reference):
        raise ValueError(f"values of the same prompts are compared, got {len(values)} and {len(reference)}")
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
    """The chance that a sum of `differences` [P] is as far from 0 as theirs if each had its sign by a fair coin.

    So it would be if it were all the same which checkpoint a prompt's completions came from (Fisher, The Design of
    Experiments, 1935, section 21). For verdicts this is McNemar's test in its exact, binomial form. Exact up to
    `_OUTCOMES` outcomes of the coins, those of equal differences taken together; else from `_DRAWS` of them, always the
    same, themselves included (Phipson and Smyth, 2010, arXiv 1603.05766).
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
    """The chance [count + 1] of each number of heads among `count` fair coins."""
    log_factorial = np.array([math.lgamma(heads + 1) for heads in range(count + 1)])
    return np.exp(log_factorial[-1] - log_factorial - log_factorial[::-1] - count * math.log(2))


def _wilson(mean: float, prompts: int) -> Estimate:
    shrink = 1 / (1 + _Z**2 / prompts)
    centre = shrink * (mean + _Z**2 / (2 * prompts))
    half = shrink * _Z * math.sqrt(mean * (1 - mean) / prompts + _Z**2 / (4 * prompts**2))
    # The bounds are exact where the mean is 0 or 1, but for rounding.
    return Estimate(value=mean, low=min(mean, max(0.0, centre - half)), high=max(mean, min(1.0, centre + half)))


def _half_width(values: Float64Array) -> float:
    """Half of Student's t interval for the mean of values [P], P at least 2."""
    from scipy.special import stdtrit  # as above

    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def _check_values(values: Float64Array) -> None:
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"a mean over prompts needs values from 0 to 1, got {values}")
