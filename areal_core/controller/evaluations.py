"""The evaluation schedule: which published version is scored next, and which ones are kept for that."""

from __future__ import annotations

from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.controller.best import best_of
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.recorder import Recorder
from areal_core.types import PolicyVersion


class EvaluationSchedule:
    """Every `evaluation.every`-th version of a run is due, the base and the last one always; none where versions are
    not scored, and none before the end where that has to wait for it."""

    def __init__(self, config: RunConfig, ledger: TrajectoryLedger, recorder: Recorder) -> None:
        self._config = config
        self._ledger = ledger
        self._recorder = recorder

    def next(self) -> PolicyVersion | None:
        """The oldest version that is due and not scored; once the run has ended only the base and the last count,
        unless none could be scored before."""
        newest, ending = self._ledger.versions.newest(), self._ledger.notes.ending
        late = self._config.scores_at_the_end
        if not self._config.evaluated or newest is None or (late and ending is None):
            return None
        scored = self._scored()
        due = set(range(0, newest.version + 1, self._config.evaluation.every)) if late or ending is None else {0}
        if ending is not None:
            due.add(ending.version)
        for number in sorted(due):
            version = None if number in scored else self._ledger.versions.get(number)
            # Weights that another machine kept to itself are gone; no score of them will ever come.
            if version is not None and Path(version.path).exists():
                return version
        return None

    def awaited(self, newest: int) -> set[int]:
        """Versions up to `newest` whose weights are still needed: those that are due and not scored, and the best."""
        due = range(0, newest + 1, self._config.evaluation.every) if self._config.evaluated else ()
        best = best_of(self._recorder.evaluations)
        return set(due) - self._scored() | ({best.version} if best else set())

    def _scored(self) -> set[int]:
        return {evaluation.version for evaluation in self._recorder.evaluations}
