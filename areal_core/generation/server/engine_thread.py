"""The thread that steps an engine, and its interface to an event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

from areal_core.api.wire import ServerLoad
from areal_core.generation.engines.engine import Generation, ServedEngine
from areal_core.launch import heartbeat
from areal_core.tracking.timeline import Activity, TimelineWriter

T = TypeVar("T")


class _State(Enum):
    RUNNING = "running"
    DRAINING = "draining"  # running completions continue, none start
    PAUSED = "paused"


class EngineThread:
    """Steps an engine while it has work and is not paused, and runs commands between two steps.

    `deliver` receives finished completions. `failed` receives an error that ended the thread. Both are called in the
    event loop's thread. `timeline` records the engine's activities.
    """

    def __init__(
        self,
        engine: ServedEngine,
        loop: asyncio.AbstractEventLoop,
        *,
        deliver: Callable[[list[Generation]], None],
        failed: Callable[[BaseException], None],
        timeline: TimelineWriter | None = None,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._deliver = deliver
        self._failed = failed
        self._state = _State.RUNNING
        self._drained: list[Future[None]] = []
        self._clear_cache = False  # once paused
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._activity = Activity("wait", timeline)
        self._accounted_at = time.monotonic()
        self._completion_s = 0.0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def is_paused(self) -> bool:
        return self._state is _State.PAUSED

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; running completions stay unfinished."""
        self._commands.put(None)
        self._thread.join()

    def submit(self, action: Callable[[ServedEngine], Any]) -> None:
        """Run an action between two steps. An error in it ends the thread."""
        self._commands.put(lambda: action(self._engine))

    async def call(self, action: Callable[[ServedEngine], T]) -> T:
        """Run an action between two steps and return its result. The caller gets its errors."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller was cancelled
            try:
                future.set_result(action(self._engine))
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stop decoding.

        Mode `keep` holds running completions. `abort` ends all requests with their tokens so far. `wait` returns once
        running completions are finished. In `keep` and `wait`, completions without a slot stay queued.
        """

        def pause(engine: ServedEngine) -> Future[None]:
            paused: Future[None] = Future()
            if mode == "abort":
                self._hand_over(engine.abort())
            self._clear_cache = clear_cache
            if mode == "wait" and engine.running:
                self._state = _State.DRAINING
                engine.admitting = False
                self._drained.append(paused)
            else:
                self._pause()
                paused.set_result(None)
            return paused

        await asyncio.wrap_future(await self.call(pause))

    async def resume(self) -> None:
        def resume(engine: ServedEngine) -> None:
            self._account()
            self._state = _State.RUNNING
            engine.admitting = True
            self._release_waiters()

        await self.call(resume)

    async def abort(self, request_ids: Collection[str]) -> int:
        """End requests with their tokens so far. Returns how many requests ended."""

        def abort(engine: ServedEngine) -> int:
            ended = engine.abort(request_ids)
            self._hand_over(ended)
            return sum(generation.last for generation in ended)

        return await self.call(abort)

    async def load(self) -> ServerLoad:
        def load(engine: ServedEngine) -> ServerLoad:
            self._account()
            return ServerLoad(
                running=engine.running,
                waiting=engine.waiting,
                completion_s=self._completion_s,
                idle_s=self._activity.seconds("wait"),
                paused_s=self._activity.seconds("update"),
                **dataclasses.asdict(engine.stats),
            )

        return await self.call(load)

    def _main(self) -> None:
        try:
            while self._run_commands():
                self._hand_over(self._engine.step())
                heartbeat.progressed()
            self._activity.end()
        except BaseException as error:  # noqa: BLE001 - the thread's owner decides
            self._loop.call_soon_threadsafe(self._failed, error)

    def _run_commands(self) -> bool:
        """Run commands until none is left and the engine can step. Returns False when the thread must end."""
        while True:
            self._account()
            if self._state is _State.DRAINING and not self._engine.running:  # all have finished or were aborted
                self._pause()
            busy = self._engine.running or (self._engine.waiting and self._engine.admitting)
            blocks = not busy or self.is_paused
            doing = "paused" if self.is_paused else "sampling" if busy else "idle"
            heartbeat.report(doing, waits_for=heartbeat.WORK if blocks else None)
            try:
                command = self._commands.get(block=blocks)
            except queue.Empty:
                return True
            self._account()
            if command is None:
                return False
            command()

    def _pause(self) -> None:
        self._account()
        self._state = _State.PAUSED
        if self._clear_cache:  # only now, because completions that were finishing needed it
            self._engine.clear_cache()
        self._release_waiters()

    def _release_waiters(self) -> None:
        for waiter in self._drained:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        self._drained.clear()

    def _hand_over(self, finished: list[Generation]) -> None:
        if finished:
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _account(self) -> None:
        """Account the time since the last call to the engine's activity in it."""
        now = time.monotonic()
        if not self.is_paused:
            self._completion_s += (now - self._accounted_at) * self._engine.running
        self._accounted_at = now
        self._activity.note("update" if self.is_paused else "generate" if self._engine.running else "wait")
