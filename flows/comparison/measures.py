"""Measures of a trial, one number each, and the effect of an arm relative to the reference.

docs/metrics.md defines the measures; functions here document only additions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_core.config.schema import RunConfig
from areal_core.types import RunSummary
from flows.comparison.intervals import Interval, paired_difference, paired_ratio
from flows.comparison.trials import TrialResult

Effect = Literal["ratio", "difference"]

SCORES = (0.5, 0.75, 0.9, 0.95)  # held-out accuracies; one of them is timed if stop.score is not set


@dataclass(frozen=True)
class Measure:
    """One row of the report's tables."""

    name: str
    unit: str  # empty if the name includes it
    digits: int | None  # decimal places; None: three significant digits
    effect: Effect  # how an arm is compared with the reference
    value: Callable[[RunSummary, TrialResult], float | None]  # None: the trial has no value
    headline: bool = False  # shown in the short result table
    of_all: bool = False  # meaningful only if every trial of the arm has a value

    @property
    def neutral(self) -> float:
        """The effect of an arm that equals the reference: 1 for ratios, 0 for differences."""
        return 1.0 if self.effect == "ratio" else 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


def measures(results: Sequence[TrialResult]) -> list[Measure]:
    """All measures that can apply to these trials."""
    config, target = results[0].trial.config, common_target(results)
    speed = [
        Measure("effective tokens/s", "", None, "ratio", lambda s, _: s.effective_tokens_per_s, headline=True),
        Measure("generated tokens/s", "", None, "ratio", lambda s, _: s.generated_tokens_per_s),
        Measure("wall time", "s", 1, "ratio", lambda s, r: s.rl_wall_s * time_scale(r.trial.config)),
    ]
    waiting = [
        Measure("steps", "", 0, "difference", lambda s, _: s.steps),
        Measure("staleness, mean", "versions", 2, "difference", lambda s, _: s.staleness_mean),
        Measure("staleness, max", "versions", 1, "difference", lambda s, _: s.staleness_max),
        _share("trainer waits", "bubble/trainer_wait"),
        _share("generation idle", "bubble/generation_idle"),
        _share("generation paused for updates", "bubble/generation_paused"),
    ]
    if config.emulated:
        return [dataclasses.replace(row, unit=f"emulated {row.unit}".strip()) for row in speed] + waiting
    learning: list[Measure] = []
    if target is not None:
        name = f"time to score {target:g}"
        learning.append(
            Measure(name, "s", 1, "ratio", lambda _, r: time_to_score(r, target), headline=True, of_all=True)
        )
    if config.evaluated:
        name, unit = "final score", "held-out accuracy"
        learning.append(Measure(name, unit, 3, "difference", lambda s, _: s.accuracy_after, headline=True))
    return speed + learning + waiting


def succeeded(results: Sequence[TrialResult], arm: str) -> list[TrialResult]:
    """The arm's trials that have a summary."""
    return [r for r in results if r.summary is not None and r.trial.arm == arm]


def values_by_seed(measure: Measure, results: Sequence[TrialResult], arm: str) -> dict[int, float]:
    """Finite values of the arm's trials, by seed."""
    values = {r.trial.seed: measure.value(r.summary, r) for r in succeeded(results, arm) if r.summary}
    return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}


def unreached(measure: Measure, results: Sequence[TrialResult], arm: str) -> int:
    """Number of the arm's successful trials without a value; 0 unless the measure needs all (`of_all`).

    If trials that never reached a score were left out, an arm that fails to learn would look faster."""
    return len(succeeded(results, arm)) - len(values_by_seed(measure, results, arm)) if measure.of_all else 0


def effect_of(measure: Measure, results: Sequence[TrialResult], arm: str, reference: str) -> Interval | None:
    """The effect of an arm relative to the reference, paired by seed.

    None if no seed has both values, if a ratio's reference is 0, or if a trial has not reached a timed score."""
    if any(unreached(measure, results, name) for name in (arm, reference)):
        return None
    values, base = (values_by_seed(measure, results, name) for name in (arm, reference))
    if not values.keys() & base.keys() or (measure.effect == "ratio" and 0.0 in base.values()):
        return None
    return (paired_ratio if measure.effect == "ratio" else paired_difference)(values, base)


def common_target(results: Sequence[TrialResult]) -> float | None:
    """The score to time: stop.score, or the highest of SCORES that every successful trial reached.

    It must be above the initial accuracy of every trial. None if no score qualifies or the trials are not evaluated."""
    trials = [result for result in results if result.summary is not None]
    if not trials or not trials[0].trial.config.evaluated:
        return None
    if (score := trials[0].trial.config.stop.score) is not None:
        return score
    start = max(r.summary.accuracy_before for r in trials if r.summary and r.summary.accuracy_before is not None)
    reached = [
        score for score in SCORES if score > start and all(time_to_score(trial, score) is not None for trial in trials)
    ]
    return max(reached, default=None)


def time_to_score(result: TrialResult, target: float) -> float | None:
    """RL wall time, in seconds, to the first published version that scored `target`; None if none did."""
    if result.summary is not None and result.trial.config.stop.score == target:
        return result.summary.time_to_score_s
    elapsed = {0: 0.0, **dict(result.curves.get("time/elapsed_s", []))}
    scores = result.curves.get("heldout/accuracy", [])
    return next((elapsed.get(version) for version, accuracy in scores if accuracy >= target), None)


def weighted_by_time(result: TrialResult, key: str) -> float | None:
    """Mean of a curve over the run's time: its points weighted by time/step_s. None without points."""
    weights = dict(result.curves.get("time/step_s", []))
    points = [(value, weights[step]) for step, value in result.curves.get(key, []) if step in weights]
    total = sum(weight for _, weight in points)
    return sum(value * weight for value, weight in points) / total if total else None


def time_scale(config: RunConfig) -> float:
    """Emulated seconds per second of the clock; 1 without emulation."""
    return config.emulation.speed if config.emulated else 1.0


def _share(name: str, key: str) -> Measure:
    """Measure of a curve that holds a share of time, in percent."""

    def of(_: RunSummary, result: TrialResult) -> float | None:
        share = weighted_by_time(result, key)
        return None if share is None else 100.0 * share

    return Measure(name, "% of time", 1, "difference", of)
