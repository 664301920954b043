"""How often a process may be started again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class RestartBudget:
    """Restarts of one process: `most` of them at once, and one comes back every `refill_s`, in monotonic time."""

    def __init__(self, most: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.total = 0  # taken so far
        self._refill_s = refill_s
        self._clock = clock
        self._left, self._at = float(most), clock()

    def take(self) -> bool:
        """Take one, if there is one."""
        self._refill()
        if self._left < 1.0:
            return False
        self._left -= 1.0
        self.total += 1
        return True

    @property
    def spent(self) -> int:
        """Those that have not come back."""
        return self.most - math.floor(self._left)

    def next_s(self) -> float:
        """Seconds until there is one; infinite where there never is."""
        self._refill()
        return max(0.0, 1.0 - self._left) * self._refill_s if self.most else math.inf

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(float(self.most), self._left + (now - self._at) / self._refill_s)
        self._at = now
