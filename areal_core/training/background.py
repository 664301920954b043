"""Work beside the training step: jobs in order, the first failure raised in the step.

The feed has the batches of a run, one step ahead: while a step trains, the next batch is fetched, laid out and packed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from areal_core.api.controller_client import ControllerClient
from areal_core.training.engines.engine import TrainingBatch
from areal_core.types import BatchManifest

_LOOK_S = 0.2  # between two calls of `meanwhile`

Ready = tuple[BatchManifest, TrainingBatch]


class BackgroundThread:
    """A thread that runs one job after another.

    At most `waiting` jobs are queued besides the one that runs: `submit` blocks while the queue is full. Once a job has
    failed no other is run, and every call raises that failure. The thread keeps no process alive: `drain` before the
    end.
    """

    def __init__(self, name: str, *, waiting: int) -> None:
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; blocks while the queue is full."""
        self.check()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise the failure of a job, if one has failed."""
        if self._failure is not None:
            raise self._failure

    @property
    def busy(self) -> bool:
        """Whether jobs are left to do."""
        return self._jobs.unfinished_tasks > 0

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done; whether they are, after `timeout_s`."""
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
    """Hands out the batches of steps `first` to `last`, in order, each once; fetches the next one when told to.

    So a batch may be fixed while the step before it trains: its groups are the oldest that are ready at that moment.
    It counts as consumed from then on, and it is trained on, whatever ends the run meanwhile. `build` lays a batch out.
    `controller` belongs to the feed's thread.
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
        """The next batch; waits for it, and calls `meanwhile` now and then. The one after it is fetched from `ahead`
        on.

        Raises RunFinished once the run has ended, and what fetching or laying out the batch raised.
        """
        while True:
            meanwhile()
            with suppress(queue.Empty):
                return self._ready.get(timeout=_LOOK_S)
            self._thread.check()

    def ahead(self) -> None:
        """Fetch the next batch in the background. To be called once for every batch that `next` has returned."""
        if (step := next(self._steps, None)) is not None:
            self._thread.submit(lambda: self._fetch(step))

    def _fetch(self, step: int) -> None:
        manifest = self._controller.batch(step)
        self._ready.put((manifest, self._build(manifest)))
