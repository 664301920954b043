"""Threads by turns, in virtual time: every order in which they can meet at a store, and days in milliseconds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from areal_core.storage.objects import Storage

_PATIENCE_S = 120.0  # real ones, for a thread to take its turn


class Turns:
    """Threads of which one runs at a time, chosen anew before everything that it does with the store; virtual time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._changed = threading.Condition()
        self._waiting: dict[str, float] = {}  # threads, and the time before which they have no turn
        self._running: str | None = None
        self.now = 0.0

    def run(self, parts: dict[str, Callable[[], None]]) -> None:
        """Run all parts to their ends, each in a thread; raises the first failure."""
        failures: list[BaseException] = []

        def play(part: Callable[[], None]) -> None:
            try:
                self.take()
                part()
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)
            with self._changed:
                self._running = None
                self._changed.notify_all()

        threads = [threading.Thread(target=play, args=(part,), name=name) for name, part in parts.items()]
        for thread in threads:
            thread.start()
        with self._changed:
            self._wait(lambda: len(self._waiting) == len(threads))
            while self._waiting:
                ready = [name for name, time in self._waiting.items() if time <= self.now]
                if not ready:
                    self.now = min(self._waiting.values())
                    continue
                self._running = self._rng.choice(sorted(ready))
                del self._waiting[self._running]
                self._changed.notify_all()
                self._wait(lambda: self._running is None)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def take(self, seconds: float = 0.0) -> None:
        """In a part: wait for its turn, which does not come before `seconds` have passed."""
        me = threading.current_thread().name
        with self._changed:
            self._waiting[me] = self.now + seconds
            if self._running == me:
                self._running = None
            self._changed.notify_all()
            self._wait(lambda: self._running == me)

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert self._changed.wait_for(condition, _PATIENCE_S), "a thread does not take its turn"


class TurnStorage:
    """A store whose every operation is a turn of its own."""

    def __init__(self, storage: Storage, turns: Turns) -> None:
        self._storage = storage
        self._turns = turns
        self.url = storage.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            self._turns.take()
            return getattr(self._storage, name)(*arguments)

        return operation
