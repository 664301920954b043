"""Choose versions to evaluate; delete obsolete versions, checkpoints, payloads, evaluation pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.export import best_of
from areal_core.controller.recorder import Recorder
from areal_core.controller.snapshots import Snapshots
from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.types import PolicyVersion


class EvaluationSchedule:
    """Selects versions to evaluate: every `evaluation.every`-th, and always the base and the last one.

    Selects none if the run does not evaluate, and none before the end if evaluation must wait for the end.
    """

    def __init__(self, config: RunConfig, ledger: TrajectoryLedger, recorder: Recorder) -> None:
        self.config = config
        self.ledger = ledger
        self.recorder = recorder

    def next(self) -> PolicyVersion | None:
        """Return the oldest version that is due and has no score; None if there is none.
        Once the run has ended, only the base and the last version are due, unless all evaluation happens at the end."""
        newest, ending = self.ledger.versions.newest(), self.ledger.notes.ending
        late = self.config.scores_at_the_end
        if not self.config.evaluated or newest is None or (late and ending is None):
            return None
        scored = self._scored()
        due = set(range(0, newest.version + 1, self.config.evaluation.every)) if late or ending is None else {0}
        if ending is not None:
            due.add(ending.version)
        for number in sorted(due):
            version = None if number in scored else self.ledger.versions.get(number)
            # The files of some versions existed only on a lost machine; these versions can't be evaluated.
            if version is not None and Path(version.path).exists():
                return version
        return None

    def needed(self, newest: int) -> set[int]:
        """Versions up to `newest` that must be kept: due ones without a score, and the best one."""
        due = range(0, newest + 1, self.config.evaluation.every) if self.config.evaluated else ()
        best = best_of(self.recorder.evaluations)
        return set(due) - self._scored() | ({best.version} if best else set())

    def _scored(self) -> set[int]:
        return {evaluation.version for evaluation in self.recorder.evaluations}


logger = logging.getLogger(__name__)
_VERSIONS_KEPT = 8  # at most, of the newest: servers may stage one, and the trainer compares engines on old ones


@dataclass(eq=False)
class Retention:
    """Deletes obsolete data of one run, for its controller."""

    schedule: EvaluationSchedule
    snapshots: Snapshots
    loading: Callable[[], Collection[int]]  # versions that servers are loading
    _pruning: asyncio.Task[None] | None = field(default=None, init=False)

    def obsolete_versions(self) -> list[int]:
        """Versions whose folders can be deleted: no loading server, evaluation or restart needs them."""
        newest = self.schedule.ledger.versions.newest()
        kept = min(self.schedule.config.max_staleness + 2, _VERSIONS_KEPT)
        last = 0 if newest is None else newest.version - kept
        needed = {*self.schedule.needed(last), *self.loading()}  # a load may take longer than many steps
        return [version for version in range(1, last + 1) if version not in needed]

    async def prune_pages(self) -> None:
        """Delete old evaluation pages, with their records and tables, after a version was evaluated."""
        scored = sorted(self.schedule.recorder.evaluations, key=lambda known: known.version)
        best, keep = best_of(scored), self.schedule.config.evaluation.keep_pages
        if best is None or keep is None:
            return
        kept = {known.version for known in (scored[0], best, *scored[-keep:])}
        try:
            obsolete = {known.version for known in scored} - kept
            await asyncio.to_thread(_delete_pages, self.snapshots.run.evaluations, obsolete)
        except OSError as error:
            logger.warning("could not delete old evaluation pages: %s; will retry", error)

    def start_pruning(self) -> None:
        """Delete older checkpoints, and the payloads that no replay needs, after a checkpoint is complete.
        Runs in the background. The next call retries failed deletions."""
        if self._pruning is None or self._pruning.done():
            self._pruning = asyncio.ensure_future(self._prune_in_turn())

    async def wait_until_pruned(self) -> None:
        """Wait until the background deletion has finished."""
        if self._pruning is not None:
            await asyncio.wait([self._pruning])

    async def _prune_in_turn(self) -> None:
        try:
            async with self.snapshots.exclusive:
                await self._prune()
        except (StorageError, OSError) as error:
            logger.warning("could not delete obsolete files: %s; will retry", error)

    async def _prune(self) -> None:
        config, ledger = self.schedule.config, self.schedule.ledger
        oldest = await asyncio.to_thread(
            checkpoint.prune,
            self.snapshots.storage,
            config.training.keep_checkpoints,
            number=self.snapshots.number,
            in_use=self.snapshots.in_use,
        )
        if config.rollout.retain == "uncommitted":
            kept = self.schedule.needed(oldest)
            while ledger.free(oldest) or ledger.prune(kept):
                await asyncio.to_thread(ledger.flush)
        await self.snapshots.payloads.keep(ledger.payloads.segments())


def _delete_pages(folder: Path, versions: Collection[int]) -> None:
    for version in versions:
        for file in folder.glob(f"v{version:06d}-*"):
            file.unlink(missing_ok=True)
