"""Retry transient failures of a store with exponential back-off, up to a time limit."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from areal_core.storage.bucket import Bucket
    from areal_core.storage.folder import Folder

T = TypeVar("T")
_FIRST_S, _LONGEST_S = 0.25, 10.0  # between two tries
_log = logging.getLogger(__name__)


class Attempt(Protocol):
    """Runs a piece of work and retries it after transient failures; raises the last error."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic seconds, and a way to sleep."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class RetryPolicy:
    """Retries work for up to `limit_s` seconds from the first try; 0 means one try. Thread-safe.

    Even after the limit there is a second try, because the process itself may have been suspended, not the store. With
    `quiet` nothing is logged.
    """

    def __init__(self, limit_s: float, clock: Clock | None = None, *, quiet: bool = False) -> None:
        self.limit_s = limit_s
        self.clock = clock or Clock()
        self._quiet = quiet

    def run(self, work: Callable[[], T], what: str, failures: Folder | Bucket) -> T:
        """The result of `work`, which must be repeatable; raises its last error.
        `what` describes the work in log lines, such as "write s3://bucket/x"."""
        started = self.clock.now()
        try:
            return work()
        except failures.errors as error:
            if not failures.transient(error) or not self.limit_s:
                raise
            if not self._quiet:
                bound = f"{self.limit_s:g} s (storage.patience_s)"
                _log.warning("storage: can't %s: %s; retrying for up to %s", what, failures.reason(error), bound)
        done = self._again(work, failures, started + self.limit_s)
        if not self._quiet:
            _log.info("storage: responds again, after %.1f s", self.clock.now() - started)
        return done

    def _again(self, work: Callable[[], T], failures: Folder | Bucket, deadline: float) -> T:
        delay = _FIRST_S
        while True:
            jittered = delay * random.uniform(0.5, 1.0)  # jitter, so that clients do not retry at the same time
            self.clock.sleep(max(0.0, min(jittered, deadline - self.clock.now())))
            try:
                return work()
            except failures.errors as error:
                if not failures.transient(error) or self.clock.now() >= deadline:
                    raise
            delay = min(2 * delay, _LONGEST_S)
