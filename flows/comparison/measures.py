"""What is measured of a trial, one number each, and which trials it can be compared over.

Definitions are those of docs/metrics.md; what is added here says so at its function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_core.config.schema import RunConfig
from areal_core.planning.account import occupied
from areal_core.tracking.timeline import Span
from areal_core.types import RunSummary
from flows.comparison.statistics import Interval, paired_difference, paired_ratio
from flows.comparison.trials import TrialResult

Effect = Literal["ratio", "difference"]

SCORES = (0.5, 0.75, 0.9, 0.95)  # held-out accuracies, one of which is timed where stop.score sets none
_ROLES = ("generation", "rewards", "trainer", "publisher", "evaluator")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One row of the report's tables."""

    name: str
    unit: str  # empty where the name says it
    digits: int  # after the point
    effect: Effect  # how two arms are compared
    value: Callable[[TrialResult], float | None]  # None: this trial has none
    whole: bool = False  # means nothing of an arm some of whose trials have none

    @property
    def is_time(self) -> bool:
        """Of a clock, be it that of an emulated cluster."""
        return self.unit in ("s", "emulated s")

    @property
    def neutral(self) -> float:
        """The effect of an arm that is like the reference."""
        return 1.0 if self.effect == "ratio" else 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


def measures(config: RunConfig, target: float | None) -> list[Measure]:
    """All that say something of runs like `config`; `target` is the score that is timed."""
    if config.emulated:
        return [dataclasses.replace(row, unit=f"emulated {row.unit}".strip()) for row in _speed()] + _waiting()
    return _speed() + (_learning(target) if config.evaluated else []) + _waiting()


def _speed() -> list[Measure]:
    return [
        _of_summary("effective tokens/s", "", 0, "ratio", lambda s, c: s.effective_tokens_per_s),
        _of_summary(
            "effective tokens/s per device",
            *("", 0, "ratio"),
            lambda s, c: s.effective_tokens_per_s / c.launch.devices,
        ),
        _of_summary(
            "generated tokens/s per device",
            *("", 0, "ratio"),
            lambda s, c: s.generated_tokens_per_s / c.launch.devices,
        ),
        _of_summary("wall time", "s", 1, "ratio", lambda s, c: s.rl_wall_s * time_scale(c)),
    ]


def _learning(target: float | None) -> list[Measure]:
    rows = [_of_summary("final score", "held-out accuracy", 3, "difference", lambda s, c: s.accuracy_after)]
    if target is not None:
        timed = Measure(
            name=f"time to score {target:g}",
            unit="s",
            digits=1,
            effect="ratio",
            value=lambda result: time_to_score(result, target),
            whole=True,
        )
        rows.insert(0, timed)
    return rows


def _waiting() -> list[Measure]:
    return [
        _of_summary("staleness, mean", "versions", 2, "difference", lambda s, c: s.staleness_mean),
        _of_summary("staleness, max", "versions", 1, "difference", lambda s, c: s.staleness_max),
        _share("trainer waits", lambda r: weighted_by_time(r, "bubble/trainer_wait")),
        _share("generation idle", lambda r: weighted_by_time(r, "bubble/generation_idle")),
        _share("generation paused for updates", lambda r: weighted_by_time(r, "bubble/generation_paused")),
        _share("devices idle", devices_idle),
    ]


def succeeded(results: Sequence[TrialResult], arm: str | None = None) -> list[TrialResult]:
    """Trials with a summary, of one arm or of all."""
    return [r for r in results if r.summary is not None and arm in (None, r.trial.arm)]


def values_by_seed(measure: Measure, results: Sequence[TrialResult], arm: str) -> dict[int, float]:
    """Seed -> value, of the arm's trials that have one."""
    values = {result.trial.seed: measure.value(result) for result in succeeded(results, arm)}
    return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}


def unreached(measure: Measure, results: Sequence[TrialResult], arm: str) -> int:
    """How many successful trials of the arm lack what only a whole arm can have.

    Without those that never reached a score, an arm that fails to learn would look the faster for it.
    """
    return len(succeeded(results, arm)) - len(values_by_seed(measure, results, arm)) if measure.whole else 0


def pairs(results: Sequence[TrialResult], arm: str, reference: str) -> set[int]:
    """Seeds that succeeded in both arms."""
    return {r.trial.seed for r in succeeded(results, arm)} & {r.trial.seed for r in succeeded(results, reference)}


def effect_of(measure: Measure, results: Sequence[TrialResult], arm: str, reference: str) -> Interval | None:
    """An arm against the reference, seed by seed.

    None where no seed has both, where the reference is 0, to which there is no ratio, or where a trial has not reached
    what is timed.
    """
    if any(unreached(measure, results, name) for name in (arm, reference)):
        return None
    values, base = (values_by_seed(measure, results, name) for name in (arm, reference))
    if not values.keys() & base.keys() or (measure.effect == "ratio" and 0.0 in base.values()):
        return None
    return (paired_ratio if measure.effect == "ratio" else paired_difference)(values, base)


def common_target(results: Sequence[TrialResult]) -> float | None:
    """The score to time: stop.score, else the highest of SCORES that every successful trial reached by training.

    None where there is no such score, or versions are not scored.
    """
    trials = succeeded(results)
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
    """Seconds of RL wall time until the first scored version that reached `target` was published; None: none did."""
    if result.summary is not None and result.trial.config.stop.score == target:
        return result.summary.time_to_score_s
    elapsed = {0: 0.0, **dict(result.curves.get("time/elapsed_s", []))}
    scores = result.curves.get("heldout/accuracy", [])
    return next((elapsed.get(version) for version, accuracy in scores if accuracy >= target), None)


def weighted_by_time(result: TrialResult, key: str) -> float | None:
    """The mean of a curve over the run's time: its points weighted by time/step_s. None without points."""
    weights = dict(result.curves.get("time/step_s", []))
    points = [(value, weights[step]) for step, value in result.curves.get(key, []) if step in weights]
    total = sum(weight for _, weight in points)
    return sum(value * weight for value, weight in points) / total if total else None


def devices_idle(result: TrialResult) -> float | None:
    """Share of devices x wall time in which no generation server and no trainer rank was busy, see `account.occupied`.

    None without spans, and for a run that was resumed: its spans hold work that was done twice.
    """
    window = rl_window(result)
    if window is None or resumed(result):
        return None
    return 1.0 - occupied(result.spans, result.trial.config, start_s=window[0], end_s=window[1])


def resumed(result: TrialResult) -> bool:
    """Whether the run was cut off and went on: its times include work that was done twice."""
    return result.summary is not None and result.summary.starts > 1


def time_scale(config: RunConfig) -> float:
    """Seconds that a second of the clock stands for: those of the emulated cluster, where there is one."""
    return config.emulation.speed if config.emulated else 1.0


def rl_window(result: TrialResult) -> tuple[float, float] | None:
    """Start and end of the RL wall time, in seconds since the epoch: it ends as the last version is published.

    Of a run that was restarted, its last part: wall time leaves out what lay between.
    """
    published = publications(result.spans)
    if result.summary is None or not published or not result.summary.rl_wall_s:
        return None
    end = published[-1].end_s
    return end - result.summary.rl_wall_s, end


def publications(spans: Sequence[Span]) -> list[Span]:
    """The publications of versions, by their end."""
    return sorted((span for span in spans if span.kind == "publish"), key=lambda span: span.end_s)


def in_ring_order(process: str) -> tuple[int, int]:
    """Key that sorts processes as they are read: servers, ranks, the evaluator, each by its index."""
    name, _, index = process.rpartition("-")
    return _ROLES.index(name), int(index)


def _of_summary(
    name: str, unit: str, digits: int, effect: Effect, value: Callable[[RunSummary, RunConfig], float | None]
) -> Measure:
    def of(result: TrialResult) -> float | None:
        return None if result.summary is None else value(result.summary, result.trial.config)

    return Measure(name=name, unit=unit, digits=digits, effect=effect, value=of)


def _share(name: str, value: Callable[[TrialResult], float | None]) -> Measure:
    """A share of time, in percent."""

    def of(result: TrialResult) -> float | None:
        share = value(result)
        return None if share is None else 100.0 * share

    return Measure(name=name, unit="% of time", digits=1, effect="difference", value=of)
