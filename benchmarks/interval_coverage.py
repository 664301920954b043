"""How often do the intervals of `evaluation/statistics.py` contain the truth? How good is its paired test?

    python -m benchmarks.interval_coverage [--repetitions 10000] [--pairs 2000]

It draws benchmarks of P prompts with n completions each, many times. Difficulties are from a beta distribution with a
given mean accuracy and a given correlation between two completions of a prompt: 0 if all prompts are equally hard, near
1 if each is always or never solved. For pass@1, means of m and 1 - m are equivalent by symmetry. The second checkpoint
of a pair is

- `same`: equally good on every prompt;
- `redrawn`: with newly drawn difficulties on three prompts in ten: equally good overall, not on every prompt;
- `all`: on every prompt, correct in one of ten cases in which the first fails;
- `few`: the same in one of two cases, on three prompts in twenty.

For each case: `covered`, the share of intervals that contain the truth. For pairs also `rejected`, the share of
p-values of at most 0.05 (the size of the test for the first two, its power for the others), and `disagree`, the share
of pairs whose p-value and interval disagree about 0. Takes some minutes on one core.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from areal_core.evaluation.statistics import difference, estimate, pass_at_k
from benchmarks._harness import parser, positive, report

Values = NDArray[np.float64]
Change = Literal["same", "redrawn", "all", "few"]

PROMPTS = (30, 100, 500)
COMPLETIONS = (1, 8, 32)
CORRELATIONS = (0.0, 0.1, 0.3, 0.6, 0.9)
MEANS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
KS = (1, 8)  # of pass@k


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Distribution from which benchmarks are drawn."""

    prompts: int  # P
    completions: int  # n of a prompt
    mean: float  # accuracy over all prompts of the kind
    correlation: float  # between two completions of a prompt, from 0 to below 1


def main() -> None:
    args = parser(__doc__, overrides=False)
    args.add_argument("--repetitions", type=positive, default=10_000, help="number of repetitions of each case")
    args.add_argument(
        "--pairs", type=positive, default=2000, help="number of repetitions of each case with a pair of checkpoints"
    )
    given = args.parse_args()
    report(lambda: {"intervals": intervals(given.repetitions), "pairs": pairs(given.pairs)})


def intervals(repetitions: int) -> list[dict[str, Any]]:
    cases = (
        (Benchmark(prompts=p, completions=n, mean=mean, correlation=correlation), k)
        for p, n, correlation, mean, k in product(PROMPTS, COMPLETIONS, CORRELATIONS, MEANS, KS)
        if (n > 1 or correlation == 0) and (k == 1 or k < n)  # one completion a prompt knows no correlation
    )
    return [
        {**asdict(case), "k": k, "pass_at_k": true_pass_at_k(case, k), "covered": covered(case, k, repetitions)}
        for case, k in cases
    ]


def pairs(repetitions: int) -> list[dict[str, Any]]:
    cases = (
        Benchmark(prompts=p, completions=n, mean=mean, correlation=correlation)
        for p, n, correlation, mean in product(PROMPTS, COMPLETIONS, (0.1, 0.6), (0.1, 0.5))
    )
    return [
        {**asdict(case), "change": change, **paired(case, change, repetitions)}
        for case, change in product(cases, get_args(Change))
    ]


def covered(benchmark: Benchmark, k: int, repetitions: int, *, seed: int = 0) -> float:
    """Share of `repetitions` benchmarks whose interval of pass@k contains the true value."""
    rng = np.random.default_rng(seed)
    n = benchmark.completions
    value_of = pass_at_k(np.arange(n + 1), np.full(n + 1, n), k)  # of each number of correct completions
    truth = true_pass_at_k(benchmark, k)
    correct = _correct(benchmark, _difficulties(benchmark, repetitions, rng), rng)
    found = [estimate(values) for values in value_of[correct]]
    return float(np.mean([one.low <= truth <= one.high for one in found]))


def paired(benchmark: Benchmark, change: Change, repetitions: int, *, seed: int = 0) -> dict[str, float]:
    """Results of `repetitions` comparisons of two checkpoints."""
    rng = np.random.default_rng(seed)
    before = _difficulties(benchmark, repetitions, rng)
    after, truth = _changed(benchmark, before, change, rng)
    found = [
        difference(second / benchmark.completions, first / benchmark.completions)
        for second, first in zip(_correct(benchmark, after, rng), _correct(benchmark, before, rng), strict=True)
    ]
    rejected = np.array([one.p_value <= 0.05 for one in found])
    without_0 = np.array([not one.low <= 0 <= one.high for one in found])
    return {
        "covered": float(np.mean([one.low <= truth <= one.high for one in found])),
        "rejected": float(rejected.mean()),
        "disagree": float((rejected != without_0).mean()),
    }


def _difficulties(benchmark: Benchmark, repetitions: int, rng: np.random.Generator) -> Values:
    """Probability of a correct completion by prompt, [repetitions, P]."""
    shape = repetitions, benchmark.prompts
    if benchmark.correlation == 0:
        return np.full(shape, benchmark.mean)
    total = _beta_total(benchmark)
    return rng.beta(benchmark.mean * total, (1 - benchmark.mean) * total, shape)


def _changed(benchmark: Benchmark, before: Values, change: Change, rng: np.random.Generator) -> tuple[Values, float]:
    """Probabilities of the second checkpoint, [repetitions, P], and the true difference of the means."""
    if change == "same":
        return before, 0.0
    if change == "redrawn":
        return np.where(rng.random(before.shape) < 0.3, _difficulties(benchmark, len(before), rng), before), 0.0
    prompts, mended = {"all": (1.0, 0.1), "few": (0.15, 0.5)}[change]
    after = np.where(rng.random(before.shape) < prompts, before + mended * (1 - before), before)
    return after, prompts * mended * (1 - benchmark.mean)


def _correct(benchmark: Benchmark, difficulties: Values, rng: np.random.Generator) -> NDArray[np.int64]:
    """Number of correct completions by prompt, [repetitions, P]."""
    return rng.binomial(benchmark.completions, difficulties)


def true_pass_at_k(benchmark: Benchmark, k: int) -> float:
    """True pass@k, 1 - E (1 - p)^k, as a product of beta moments; for k = 1 the mean itself."""
    failed = 1 - benchmark.mean
    if benchmark.correlation == 0:
        return 1 - failed**k
    total = _beta_total(benchmark)
    return 1 - math.prod((failed * total + i) / (total + i) for i in range(k))


def _beta_total(benchmark: Benchmark) -> float:
    """a + b of Beta(a, b): the correlation of two completions is 1 / (a + b + 1), and the mean a / (a + b)."""
    return 1 / benchmark.correlation - 1


if __name__ == "__main__":
    main()
