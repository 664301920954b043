"""Retention: which old versions' weights, and which trajectories that a checkpoint covers, are no longer needed."""

from __future__ import annotations

from areal_core.config.schema import RunConfig
from areal_core.controller.evaluations import EvaluationSchedule
from areal_core.rollout.ledger import TrajectoryLedger

_VERSIONS_KEPT = 8  # at most, of the newest: servers may be staging one, and the trainer compares engines on old ones


class Retention:
    def __init__(self, config: RunConfig, ledger: TrajectoryLedger, schedule: EvaluationSchedule) -> None:
        self._config = config
        self._ledger = ledger
        self._schedule = schedule

    def released(self) -> list[int]:
        """Versions whose folders are no longer needed: by no server that loads, nor the evaluator, nor a restart."""
        newest = self._ledger.versions.newest()
        kept = min(self._config.max_staleness + 2, _VERSIONS_KEPT)
        last = 0 if newest is None else newest.version - kept
        awaited = self._schedule.awaited(last)
        return [version for version in range(1, last + 1) if version not in awaited]

    def committed(self, step: int) -> None:
        """A checkpoint of `step` is complete: a run would be replayed from later batches only."""
        if self._config.rollout.retain == "uncommitted":
            self._ledger.free(step)
