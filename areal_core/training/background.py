"""Work beside the training step: in a thread, in order, its first failure raised where the step next looks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class BackgroundThread:
    """A thread that does one job after another.

    At most `waiting` jobs wait beside the one that runs: who hands in more waits too. Once a job has failed no other is
    done, and every call raises that failure. The thread keeps no process alive: `drain` before the end.
    """

    def __init__(self, name: str, *, waiting: int) -> None:
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done after those before it."""
        self.check()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise what a job has failed with, if one has."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until all is done."""
        self._jobs.join()
        self.check()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # noqa: BLE001 - raised again where the caller looks
                self._failure = error
            finally:
                self._jobs.task_done()
