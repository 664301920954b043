"""The batches of a run, one step ahead: while a step trains, the next batch is fetched, laid out and packed."""

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
        self._ready: queue.Queue[Ready | BaseException] = queue.Queue(1)
        self._wanted = threading.Semaphore(1)  # the first batch
        threading.Thread(target=self._fetch, args=(range(first, last + 1),), name="feed", daemon=True).start()

    def next(self, meanwhile: Callable[[], None] = lambda: None) -> Ready:
        """The next batch; waits for it, and calls `meanwhile` now and then. The one after it is fetched from `ahead`
        on.

        Raises RunFinished once the run has ended, and what fetching or laying out the batch raised.
        """
        found = None
        while found is None:
            meanwhile()
            with suppress(queue.Empty):
                found = self._ready.get(timeout=_LOOK_S)
        if isinstance(found, BaseException):
            self._ready.put(found)  # for later calls
            raise found
        return found

    def ahead(self) -> None:
        """Fetch the next batch in the background. To be called once for every batch that `next` has returned."""
        self._wanted.release()

    def _fetch(self, steps: range) -> None:
        try:
            for step in steps:
                self._wanted.acquire()
                manifest = self._controller.batch(step)
                self._ready.put((manifest, self._build(manifest)))
        except BaseException as error:  # noqa: BLE001 - raised again by `next`
            self._ready.put(error)
