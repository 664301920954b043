"""A background thread for work beside the training step: jobs in order, the first failure raised in the step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


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

    def drain(self) -> None:
        """Wait until all jobs are done."""
        self._jobs.join()
        self.check()

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
