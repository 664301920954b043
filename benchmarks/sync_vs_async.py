"""How much faster is asynchronous training on the cores of this machine, and does it cost quality?

    python -m benchmarks.sync_vs_async [--seeds 1,2,3,4,5]

Four ratios of effective tokens/s, each the median over seeds of the ratio within a seed. Runs are interleaved in time:

- `standard_over_strong`: the default task, asynchronous over the strong synchronous baseline. In the baseline every
  core generates, then every core trains, without a forward pass for a proximal policy that equals the behaviour policy;
- `long_tail_over_strong`: the same with small batches of completions of very different lengths
  (`experiment=long-tail`);
- `standard_over_naive`, `long_tail_over_naive`: over a synchronous run that trains on one core only. With small
  batches this baseline is no weaker.

All arms of a seed have the same prompts, the same number of trained trajectories and the same two cores. Only the base
model and the last version are scored, so that the cores generate and train.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_core.errors import ConfigError, ProcessError
from areal_core.types import RunSummary
from benchmarks import _harness
from flows.comparison.design import Comparison
from flows.comparison.intervals import Interval, paired_difference, paired_ratio, verdict
from flows.comparison.trials import TrialResult, run_trial

ASYNC = ["mode=async"]
STRONG = ["mode=sync"]
NAIVE = ["mode=sync", "training.ranks=1"]


Measure = Callable[[Sequence[int], Sequence[str]], dict[str, Any]]  # of seeds and overrides for all arms


def main() -> None:
    command(__doc__ or "", measure, seeds=[1, 2, 3, 4, 5])


def command(text: str, measure: Measure, *, seeds: Sequence[int]) -> None:
    """Command of a benchmark that compares runs over seeds; `text` describes it."""
    parser = _harness.parser(text)
    parser.add_argument("--seeds", type=_harness.numbers, default=seeds)
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: measure(arguments.seeds, arguments.overrides))


def measure(seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    standard = run_arms("cpu-async", {"strong": STRONG, "async": ASYNC, "naive": NAIVE}, seeds, overrides)
    long_tail = run_arms("long-tail", {"strong": STRONG, "async": ASYNC, "naive": NAIVE}, seeds, overrides)
    pairs = {
        "standard_over_strong": (standard["async"], standard["strong"]),
        "long_tail_over_strong": (long_tail["async"], long_tail["strong"]),
        "standard_over_naive": (standard["async"], standard["naive"]),
        "long_tail_over_naive": (long_tail["async"], long_tail["naive"]),
    }
    ratios = {name: paired_ratio(speeds(arm), speeds(other)) for name, (arm, other) in pairs.items()}
    accuracies = {name: paired_difference(_scores(arm), _scores(other)) for name, (arm, other) in pairs.items()}
    return {
        **{name: round(ratio.median, 3) for name, ratio in ratios.items()},
        "intervals": {name: shown(ratio) for name, ratio in ratios.items()},
        "accuracy_difference": {
            name: shown(interval) | {"verdict": verdict(interval, 0.0)} for name, interval in accuracies.items()
        },
        "effective_tokens_per_s": {
            f"{task}_{arm}": {seed: round(speed) for seed, speed in speeds(summaries).items()}
            for task, arms in (("standard", standard), ("long_tail", long_tail))
            for arm, summaries in arms.items()
        },
        "seeds": list(seeds),
    }


def run_arms(
    experiment: str, arms: Mapping[str, Sequence[str]], seeds: Sequence[int], overrides: Sequence[str]
) -> dict[str, dict[int, RunSummary]]:
    """Summaries by arm and seed. Raises ProcessError if a run fails: a ratio without it would mislead."""
    if any(override.partition("=")[0] == "generation.engine" for override in overrides):
        raise ConfigError("generation.engine: must not be given; benchmarks.emulated measures emulated clusters")
    comparison = f"bench-{experiment}-{secrets.token_hex(3)}"
    common = ["tracking=off", f"evaluation.every={_harness.NEVER}", *overrides]
    trials = Comparison(comparison, experiment, arms, seeds, common).trials()
    results: list[TrialResult] = []
    for number, trial in enumerate(trials, 1):
        _harness.tell(f"trial {number} of {len(trials)}: {trial.run_id}")
        results.append(run_trial(trial, log=_harness.tell))
        if failure := results[-1].failure:
            _harness.tell(f"{trial.run_id} failed: {failure}")
    summaries: dict[str, dict[int, RunSummary]] = {arm: {} for arm in arms}
    for result in results:
        if result.summary is None:
            raise ProcessError(f"{result.trial.run_id} failed: {result.failure}")
        summaries[result.trial.arm][result.trial.seed] = result.summary
    return summaries


def speeds(summaries: Mapping[int, RunSummary]) -> dict[int, float]:
    return {seed: summary.effective_tokens_per_s for seed, summary in summaries.items()}


def _scores(summaries: Mapping[int, RunSummary]) -> dict[int, float]:
    return {seed: summary.accuracy_after for seed, summary in summaries.items() if summary.accuracy_after is not None}


def shown(interval: Interval) -> dict[str, float]:
    return {name: round(value, 4) for name, value in dataclasses.asdict(interval).items()}


if __name__ == "__main__":
    main()
