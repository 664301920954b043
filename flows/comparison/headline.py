"""The main figures of a comparison in a few numbers: for a terminal, and as metrics of its run in MLflow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flows.comparison.measures import Measure, common_target, effect_of, measures, succeeded, values_by_seed
from flows.comparison.plan import Arm
from flows.comparison.report import EMULATED
from flows.comparison.statistics import Interval, median_interval, verdict
from flows.comparison.trials import TrialResult

_SPEED, _SCORE = "effective tokens/s", "final score"


def result_table(arms: Sequence[Arm], results: Sequence[TrialResult]) -> list[dict[str, str]]:
    """A row an arm: speed, what it is to the reference's, the score in the end, and how many trials that speaks of."""
    rows = {row.name: row for row in _measures(results)}
    reference = arms[0].name
    return [
        {
            "arm": arm.name,
            _SPEED: _measured(rows.get(_SPEED), results, arm.name),
            f"against {reference}": _compared(rows.get(_SPEED), results, arm.name, reference),
            _SCORE: _measured(rows.get(_SCORE), results, arm.name),
            "succeeded": _succeeded(results, arm.name),
        }
        for arm in arms
    ]


def result_title(comparison: str, arms: Sequence[Arm], results: Sequence[TrialResult]) -> str:
    """What stands over the table: how far its intervals can be trusted."""
    title = f"{EMULATED}\n" if results[0].trial.config.emulated else ""
    fewest = min(len(succeeded(results, arm.name)) for arm in arms)
    if fewest < 2:
        return f"{title}Result of {comparison}"
    share = 100 * median_interval(range(fewest)).coverage
    return f"{title}Result of {comparison}: medians over {fewest} seeds, intervals of {share:.4g} %"


def metrics(arms: Sequence[Arm], results: Sequence[TrialResult]) -> dict[str, float]:
    """`comparison/<arm>.<measure>.<ratio or difference>` to the reference, the median, with `.low` and `.high` of its
    interval, of the measures that most readers come for; without what no pair of trials has.

    The prefix is one for all: MLflow makes a section of charts of each.
    """
    reference, *others = [arm.name for arm in arms]
    found: dict[str, float] = {}
    for row in _measures(results):
        if row.name in (_SPEED, _SCORE) or row.unit == "s":  # seconds: wall time, time to a score
            for arm in others:
                if effect := effect_of(row, results, arm, reference):
                    key = f"comparison/{arm}.{_key(row)}.{row.effect}"
                    found |= {key: effect.median, f"{key}.low": effect.low, f"{key}.high": effect.high}
    return found


def _measures(results: Sequence[TrialResult]) -> list[Measure]:
    return measures(results[0].trial.config, common_target(results))


def _key(row: Measure) -> str:
    """ "effective tokens/s" -> "effective_tokens_per_s"."""
    return re.sub(r"\W+", "_", row.name.replace("/", " per "))


def _measured(row: Measure | None, results: Sequence[TrialResult], arm: str) -> str:
    if row is None or not (values := values_by_seed(row, results, arm)):
        return "-"
    return _brackets(median_interval(values.values()), f",.{row.digits}f")


def _compared(row: Measure | None, results: Sequence[TrialResult], arm: str, reference: str) -> str:
    if arm == reference:
        return "reference"
    if row is None or not (effect := effect_of(row, results, arm, reference)):
        return "-"
    words = "(one seed)" if effect.n == 1 else verdict(effect, 1.0)
    return f"{_brackets(effect, '.2f', 'x')} {words}"


def _brackets(interval: Interval, form: str, unit: str = "") -> str:
    median = f"{interval.median:{form}}{unit}"
    return median if interval.n == 1 else f"{median} [{interval.low:{form}}, {interval.high:{form}}]"


def _succeeded(results: Sequence[TrialResult], arm: str) -> str:
    return f"{len(succeeded(results, arm))} of {sum(result.trial.arm == arm for result in results)}"
