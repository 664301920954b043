"""A thread with its own event loop that receives and reads large response bodies.

The loop that made the request continues meanwhile. It takes the bodies that were read, a few in each of its turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from areal_core.api.pending_completions import Received

_TURN_S = 0.001  # time that a turn of the requesting loop may spend on taking, plus the last item

Take = Callable[[tuple[int, ...], Received], None]
"""Receives completions of a request by index, with the body that holds them as choices in that order."""

Work = Callable[[Take], Coroutine[Any, Any, None]]


Event = tuple[tuple[int, ...], Received] | BaseException | None
"""Arguments of `take`, an error of the work, or None when it is done."""


class DataPlane:
    """An event loop in a thread that starts with the first work. All callers must be on one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._events: deque[tuple[asyncio.Future[None], Take, Event]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False  # a call of `_drain` is scheduled

    async def run(self, work: Work, take: Take) -> None:
        """Run the work in the thread, and call `take` here, in order, with its results. Returns when all are taken.

        Raises errors of the work or of `take`. In that case, and when cancelled, it cancels the work and takes no more.
        """
        here = asyncio.get_running_loop()
        done = here.create_future()

        def post(event: Event) -> None:
            with self._lock:
                self._events.append((done, take, event))
                scheduled, self._scheduled = self._scheduled, True
            if not scheduled:
                here.call_soon_threadsafe(self._drain, here)

        async def run_in_thread() -> None:
            try:
                await work(lambda *taken: post(taken))
            except BaseException as error:  # noqa: BLE001 - raised again in `run`
                post(error)
            else:
                post(None)

        working = asyncio.run_coroutine_threadsafe(run_in_thread(), self._loop or self._start())
        try:
            await done
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the thread has ended with all its work
                working.cancel()
            raise

    async def close(self) -> None:
        """End the thread and cancel running work."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop = self._thread = None

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(loop,), name="data plane", daemon=True)
        self._thread.start()
        return loop

    def _drain(self, here: asyncio.AbstractEventLoop) -> None:
        until = here.time() + _TURN_S
        while here.time() < until:
            with self._lock:
                if not self._events:
                    self._scheduled = False
                    return
                done, take, event = self._events.popleft()
            if not done.done():
                _apply(done, take, event)
        here.call_soon(self._drain, here)


def _apply(done: asyncio.Future[None], take: Take, event: Event) -> None:
    if event is None:
        done.set_result(None)
    elif isinstance(event, asyncio.CancelledError):
        done.cancel()
    elif isinstance(event, BaseException):
        done.set_exception(event)
    else:
        try:
            take(*event)
        except Exception as error:  # noqa: BLE001 - raised again in `run`
            done.set_exception(error)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()
