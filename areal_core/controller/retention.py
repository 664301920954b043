"""Which version is scored next, and which weights, checkpoints, payloads and evaluation pages may go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.export import best_of
from areal_core.controller.payloads import PayloadStore
from areal_core.controller.recorder import Recorder
from areal_core.controller.snapshots import Snapshots
from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
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


logger = logging.getLogger(__name__)
_VERSIONS_KEPT = 8  # at most, of the newest: servers may be staging one, and the trainer compares engines on old ones


@dataclass(eq=False)
class Retention:
    """Of one run's controller."""

    config: RunConfig
    number: int
    _: KW_ONLY
    ledger: TrajectoryLedger
    recorder: Recorder
    schedule: EvaluationSchedule
    storage: Storage
    payloads: PayloadStore
    snapshots: Snapshots
    pages: Path  # the folder of evaluations
    loading: Callable[[], Collection[int]]  # versions that servers load
    _pruning: asyncio.Task[None] | None = field(default=None, init=False)

    def released(self) -> list[int]:
        """Versions whose folders are no longer needed: by no server that loads, nor the evaluator, nor a restart."""
        newest = self.ledger.versions.newest()
        kept = min(self.config.max_staleness + 2, _VERSIONS_KEPT)
        last = 0 if newest is None else newest.version - kept
        needed = {*self.schedule.awaited(last), *self.loading()}  # a server may take longer than many steps
        return [version for version in range(1, last + 1) if version not in needed]

    async def scored(self) -> None:
        """A version was scored: older pages are deleted, with the records and the table beside them."""
        scored = sorted(self.recorder.evaluations, key=lambda known: known.version)
        best, keep = best_of(scored), self.config.evaluation.keep_pages
        if best is None or keep is None:
            return
        kept = {known.version for known in (scored[0], best, *scored[-keep:])}
        try:
            await asyncio.to_thread(_delete_pages, self.pages, {known.version for known in scored} - kept)
        except OSError as error:
            logger.warning("can't delete old evaluation pages: %s; will retry", error)

    def committed(self) -> None:
        """A checkpoint is complete: older ones are deleted, and the payloads of steps that no run will be replayed
        from. It takes its time, in the background, and what fails is done with the next one."""
        if self._pruning is None or self._pruning.done():
            self._pruning = asyncio.ensure_future(self._pruned())

    async def settled(self) -> None:
        """Wait until that is done."""
        if self._pruning is not None:
            await asyncio.wait([self._pruning])

    async def _pruned(self) -> None:
        try:
            async with self.snapshots.exclusive:
                await self._prune()
        except (StorageError, OSError) as error:
            logger.warning("what is no longer needed stays for now: %s", error)

    async def _prune(self) -> None:
        oldest = await asyncio.to_thread(
            checkpoint.prune,
            self.storage,
            self.config.training.keep_checkpoints,
            number=self.number,
            in_use=self.snapshots.in_use,
        )
        if self.config.rollout.retain == "uncommitted":
            kept = self.schedule.awaited(oldest)
            while self.ledger.free(oldest) or self.ledger.fold(kept):
                await asyncio.to_thread(self.ledger.flush)
        await self.payloads.keep(self.ledger.payloads.segments())


def _delete_pages(folder: Path, versions: Collection[int]) -> None:
    for version in versions:
        for file in folder.glob(f"v{version:06d}-*"):
            file.unlink(missing_ok=True)
