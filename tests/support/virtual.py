"""An asyncio event loop whose clock jumps to whatever is due next: days pass in milliseconds, in the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal_core.storage.patience import Clock

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("deadlock: every coroutine waits and nothing is due")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing in it may wait for the outside: sockets and threads would be overtaken by the clock."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """Of `areal_core.storage.patience`: it goes on while somebody sleeps, in threads side by side, and only then."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` is called in every sleep."""
        self.slept: list[float] = []
        self.clock = Clock(now=lambda: sum(self.slept), sleep=self._sleep)
        self._meanwhile = meanwhile

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._meanwhile()
