"""The main figures of a comparison in a few numbers: for a terminal, and as metrics of its run in MLflow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flows.comparison import cells
from flows.comparison.measures import Measure, common_target, effect_of, measures, pairs, succeeded
from flows.comparison.plan import Arm
from flows.comparison.report import EMULATED
from flows.comparison.trials import TrialResult

_SPEED, _SCORE, _COVERAGE = "effective tokens/s", "final score", "intervals"


def result_table(arms: Sequence[Arm], results: Sequence[TrialResult]) -> list[dict[str, str]]:
    """A row an arm: speed, what it is to the reference's, the score in the end, how many trials that speaks of, and how
    far its intervals can be trusted."""
    rows = {row.name: row for row in _measures(results)}
    reference = arms[0].name
    return [
        {
            "arm": arm.name,
            _SPEED: _measured(rows.get(_SPEED), results, arm.name),
            f"against {reference}": _compared(rows.get(_SPEED), results, arm.name, reference),
            _SCORE: _measured(rows.get(_SCORE), results, arm.name),
            "succeeded": _succeeded(results, arm.name),
            _COVERAGE: _coverage(results, arm.name, reference),
        }
        for arm in arms
    ]


def result_title(comparison: str, arms: Sequence[Arm], results: Sequence[TrialResult]) -> str:
    """What stands over the table: how to read it."""
    title = f"{EMULATED}\n" if results[0].trial.config.emulated else ""
    if all(len(succeeded(results, arm.name)) < 2 for arm in arms):
        return f"{title}Result of {comparison}"
    return f"{title}Result of {comparison}: medians [intervals]; at the end how probably these hold the true median"


def metrics(arms: Sequence[Arm], results: Sequence[TrialResult]) -> dict[str, float]:
    """`comparison/<arm>.<measure>.<ratio or difference>` to the reference, the median, with `.low` and `.high` of its
    interval, of the measures that most readers come for; without what no pair of trials has.

    The prefix is one for all: MLflow makes a section of charts of each.
    """
    reference, *others = [arm.name for arm in arms]
    found: dict[str, float] = {}
    for row in _measures(results):
        if row.name in (_SPEED, _SCORE) or row.is_time:
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
    return cells.NONE if row is None else cells.measured(row, results, arm)


def _compared(row: Measure | None, results: Sequence[TrialResult], arm: str, reference: str) -> str:
    if arm == reference:
        return "reference"
    return cells.NONE if row is None else cells.compared(row, results, arm, reference)


def _succeeded(results: Sequence[TrialResult], arm: str) -> str:
    return f"{len(succeeded(results, arm))} of {sum(result.trial.arm == arm for result in results)}"


def _coverage(results: Sequence[TrialResult], arm: str, reference: str) -> str:
    """Of the arm's own medians, and of those over its pairs with the reference."""
    own, paired = len(succeeded(results, arm)), len(pairs(results, arm, reference))
    return cells.coverage(own) + ("" if arm == reference else f"; against {reference} {cells.coverage(paired)}")
