"""Peak memory of the processes that a benchmark starts."""

from __future__ import annotations

import threading

import psutil

_POLL_S = 1.0  # between two measurements


class PeakMemory:
    """Context manager that measures the peak memory of all child processes together, in bytes.
    Shared pages count proportionally."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def gib(self) -> float:
        return round(self.peak / 2**30, 2)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self.peak = max(self.peak, sum(map(_memory, psutil.Process().children(recursive=True))))


def _memory(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0  # it has ended
