"""Rollouts without a result: the first failure of each kind is shown whole, repeats are counted, too many end the run.

A verifier that fails now and then costs the rollouts that it can't judge. One that fails on most of them, or hangs
again and again, has a bug that no restart mends.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Mapping

from areal_core.errors import RewardError, RewardTimeoutError, RewardWorkerError, UserCodeError
from areal_core.types import Outcome

logger = logging.getLogger(__name__)
_GROUPS = 32  # of late, over which rollouts without a result are counted
_LEAST = 4  # groups with some, before the run ends on their share
_LOST_FIRST, _LOST = 3, 12  # tries in a row that cost a worker, before the run ends: before its first verdict; later
_PLACE = re.compile(r" \([^()]*:\d+\)$")  # a file and a line at the end of a failure's first line


class Failures:
    """The failures of one run's verifier and environment, since its controller started."""

    def __init__(self, max_share: float) -> None:
        """`max_share`: of the rollouts of late, environment.max_no_result."""
        self._max_share = max_share
        self._shares = deque[float](maxlen=_GROUPS)  # of the rollouts of each group: those without a result
        self._lost = 0  # tries in a row that have cost a worker
        self._judged = False  # the verifier has judged a completion
        self._seen: Counter[str] = Counter()  # failures, by who has failed, how and where

    def failed_try(self, error: RewardError) -> None:
        """A try of a group has failed. Raises UserCodeError after too many in a row that have cost a worker."""
        self._show(str(error))
        self._lost += isinstance(error, RewardTimeoutError | RewardWorkerError)
        if self._lost >= (_LOST if self._judged else _LOST_FIRST):
            raise UserCodeError(f"{_first(str(error))}: {self._lost} tries in a row failed this way; the run ends")

    def settled(self, outcomes: Mapping[Outcome, int], failure: str | None, *, truncated: int = 0) -> None:
        """A group is scored, or dropped with its `failure` and no outcomes. Those `truncated` tell nothing of the
        verifier. Raises UserCodeError where the share of rollouts without a result is too high."""
        rollouts, missing = max(0, sum(outcomes.values()) - truncated), outcomes.get(Outcome.FAILED, 0)
        if outcomes and failure is not None:
            self._show(failure, max(1, missing))
        if rollouts > missing + outcomes.get(Outcome.TIMED_OUT, 0):
            self._lost, self._judged = 0, True
        if outcomes and not rollouts:
            return
        self._shares.append(missing / rollouts if outcomes else 1.0)
        mean = sum(self._shares) / len(self._shares)
        if mean > self._max_share and sum(share > 0 for share in self._shares) >= _LEAST:
            said = _first(failure) if failure else "the verifier has no result"
            raise UserCodeError(
                f"{said}: {mean:.0%} of the rollouts of the last {len(self._shares)} groups have no result, more than "
                f"{self._max_share:.0%}; fix the verifier, or raise environment.max_no_result"
            )

    def _show(self, failure: str, times: int = 1) -> None:
        first, *rest = failure.split("\n")
        name, _, said = first.partition(": ")
        place = _PLACE.search(first)
        kind = f"{name}: {said.partition(': ')[0]}{place.group() if place else ''}"  # without a text that may differ
        before = self._seen[kind]
        self._seen[kind] += times
        if before == 0:
            logger.error("%s", first)
            for line in rest:
                logger.warning("%s", line)
        if (now := self._seen[kind]) >= 10 and len(str(now)) > len(str(before)):
            logger.warning("%d times so far: %s", now, first)


def _first(failure: str) -> str:
    return failure.partition("\n")[0]
