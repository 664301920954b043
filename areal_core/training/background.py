"""Background jobs of the trainer: an ordered job thread, and a feed that prepares the next batch.

While a step trains, the feed fetches, lays out and packs the next batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from areal_core.api.controller_client import ControllerClient
from areal_core.training.engines.engine import TrainingBatch
from areal_core.types import BatchManifest

_POLL_S = 0.2  # seconds between two calls of `meanwhile`

Ready = tuple[BatchManifest, TrainingBatch]


class BackgroundThread:
    """A thread that runs jobs one after another.

    At most `waiting` jobs are queued beside the running one; `submit` blocks while the queue is full. After a job
    fails, no other job runs and every call raises that failure. The thread is a daemon: call `drain` before the process
    ends.
    """

    def __init__(self, name: str, *, waiting: int) -> None:
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; blocks while the queue is full. Raises the failure of an earlier job."""
        self.check()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise the failure of a job, if there is one."""
        if self._failure is not None:
            raise self._failure

    @property
    def busy(self) -> bool:
        """Whether any job is unfinished."""
        return self._jobs.unfinished_tasks > 0

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done, at most `timeout_s`. Returns whether they are done."""
        with (done := self._jobs.all_tasks_done):
            ended = done.wait_for(lambda: not self.busy, timeout_s)
        self.check()
        return ended

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # noqa: BLE001 - raised again by the next call
                self._failure = error
            finally:
                self._jobs.task_done()


class BatchFeed:
    """Hands out the batches of steps `first` to `last` in order, and fetches the next one on request.

    So the controller may fix a batch while the step before it trains, from the oldest groups that are ready then. From
    that moment the batch counts as consumed, and the trainer trains on it even if the run ends meanwhile.

    `build` lays out a batch. Only the feed's thread may use `controller`.
    """

    def __init__(
        self,
        controller: ControllerClient,
        build: Callable[[BatchManifest], TrainingBatch],
        *,
        first: int,
        last: int,
    ) -> None:
        self._controller = controller
        self._build = build
        self._steps = iter(range(first, last + 1))
        self._ready: queue.SimpleQueue[Ready] = queue.SimpleQueue()
        self._thread = BackgroundThread("feed", waiting=1)
        self.ahead()

    def next(self, meanwhile: Callable[[], None] = lambda: None) -> Ready:
        """Return the next batch; calls `meanwhile` now and then while waiting.

        Call `ahead` to fetch the batch after it. Raises RunFinished if the run has ended, and every error of fetching
        or laying out the batch.
        """
        while True:
            meanwhile()
            with suppress(queue.Empty):
                return self._ready.get(timeout=_POLL_S)
            self._thread.check()

    def ahead(self) -> None:
        """Fetch the next batch in the background. Call it once for every batch that `next` has returned."""
        if (step := next(self._steps, None)) is not None:
            self._thread.submit(lambda: self._fetch(step))

    def _fetch(self, step: int) -> None:
        manifest = self._controller.batch(step)
        self._ready.put((manifest, self._build(manifest)))
