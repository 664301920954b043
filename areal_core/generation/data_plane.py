"""A thread with an event loop of its own for what is large: bodies of responses come in and are read there, while the
loop that asked for them goes on. That one gets what was read of them, a little in each of its turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from areal_core.api.pending_completions import Received

_TURN_S = 0.001  # that taking may last in a turn of the loop that asked, and what is taken last

Take = Callable[[tuple[int, ...], Received], None]
"""Is given completions of a request, by their indices, and the body that has them as its choices, in that order."""

Work = Callable[[Take], Coroutine[Any, Any, None]]


class DataPlane:
    """A loop in a thread, which begins with the first work. All that ask are of one loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._here: asyncio.AbstractEventLoop | None = None  # that of those who ask
        self._thread: threading.Thread | None = None
        self._events: deque[_Event] = deque()
        self._lock = threading.Lock()
        self._called = False  # `_look` is, or will be

    async def run(self, work: Work, take: Take) -> None:
        """Do the work there, and have `take` called here, in order, with what it takes. Returns when all is taken.
        Raises what the work raises, or `take`; then, and when cancelled, it cancels the work and takes no more."""
        here = self._here = asyncio.get_running_loop()
        job = _Job(self, work, take, here.create_future())
        loop = self._loop or self._start()
        loop.call_soon_threadsafe(job.begin, loop)
        try:
            await job.done
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and all work with it
                loop.call_soon_threadsafe(job.cancel)
            raise

    async def close(self) -> None:
        """End the thread; work under way is cancelled."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop = self._thread = None

    def post(self, event: _Event) -> None:
        """In the thread: have an event looked at by the loop that asked."""
        with self._lock:
            self._events.append(event)
            if self._called:
                return
            self._called = True
        assert self._here is not None
        self._here.call_soon_threadsafe(self._look, self._here)

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(loop,), name="data plane", daemon=True)
        self._thread.start()
        return loop

    def _look(self, here: asyncio.AbstractEventLoop) -> None:
        until = here.time() + _TURN_S
        while here.time() < until:
            with self._lock:
                if not self._events:
                    self._called = False
                    return
                job, event = self._events.popleft()
            job.see(event)
        here.call_soon(self._look, here)


class _Job:
    """One call of `run`. There are thousands, which garbage collections go through: no closures."""

    __slots__ = ("_plane", "_take", "_task", "_work", "done")

    def __init__(self, plane: DataPlane, work: Work, take: Take, done: asyncio.Future[None]) -> None:
        self.done = done
        self._plane = plane
        self._work = work
        self._take = take
        self._task: asyncio.Task[None] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._do())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def see(self, event: tuple[tuple[int, ...], Received] | BaseException | None) -> None:
        if self.done.done():
            return
        if event is None:
            self.done.set_result(None)
        elif isinstance(event, asyncio.CancelledError):
            self.done.cancel()
        elif isinstance(event, BaseException):
            self.done.set_exception(event)
        else:
            try:
                self._take(*event)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is for who waits
                self.done.set_exception(error)

    async def _do(self) -> None:
        try:
            await self._work(self._post)
        except BaseException as error:  # noqa: BLE001 - it is raised where the work was asked for
            self._plane.post((self, error))
        else:
            self._plane.post((self, None))

    def _post(self, indices: tuple[int, ...], received: Received) -> None:
        self._plane.post((self, (indices, received)))


_Event = tuple[_Job, tuple[tuple[int, ...], Received] | BaseException | None]
"""What a job takes, how it failed, or None: it is done."""


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()
