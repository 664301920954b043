"""A reward worker of another machine, as the controller sees it: it asks for work and brings its answers.

    ask: message 1 --> waits here --> response to its request --> worked on --> the next request: answer 1, and so on

A request may come twice, since what it brings or takes may have got lost: messages are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal_core.api.patience import patience
from areal_core.errors import RewardError, RewardWorkerError, SessionLostError
from areal_core.rewards.messages import BEGIN_ANEW, Outcome, decode_outcome, encode_work
from areal_core.rewards.worker import Arrived, time_limit

SILENT_S = 10.0  # without a request, after which a worker that has nothing to do is gone


class RemoteWorker:
    """One incarnation of the worker with this place, between two losses of what is suspended in it."""

    def __init__(self, place: int, incarnation: str) -> None:
        self.place = place
        self.incarnation = incarnation
        self.alive = True
        self.forgotten: list[int] = []  # groups suspended in it that are given up
        self._number = 0  # messages so far
        self._message: bytes | None = None  # the last one, until its answer is here or given up
        self._taken = False  # the worker has it
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._requests: list[Callable[[], bool]] = []  # that wait here: whether nobody waits for the response any more
        self._changed = asyncio.Event()
        self._spoke = asyncio.Event()

    @property
    def asks(self) -> bool:
        """Whether it waits for work."""
        return any(not is_gone() for is_gone in self._requests)

    async def ask(self, message: Arrived, timeout_s: float) -> Outcome:
        """As WorkerProcess.ask. The limit is kept where the worker is: raises RewardWorkerError for an answer that has
        not come soon after it, and SessionLostError for a message that the worker has not taken."""
        forgotten, self.forgotten = self.forgotten, []
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._message = encode_work(self._number, forgotten, message)
        self._taken = False
        self._changed.set()
        try:
            async with patience(time_limit(message, timeout_s) + SILENT_S):
                return decode_outcome(await self._answer)
        except TimeoutError:
            raise self._lost() from None
        finally:
            self._message = None

    async def exchange(
        self, answered: int, answer: bytes, timeout_s: float, is_gone: Callable[[], bool]
    ) -> bytes | None:
        """See RewardPool.exchange."""
        if self._message is not None and answered == self._number and not self._answer.done():
            self._answer.set_result(answer)
        self._requests.append(is_gone)
        self._spoke.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self.alive:
                    if self._message is not None and self._number > answered:
                        self._taken = self._taken or not is_gone()
                        return self._message
                    self._changed.clear()
                    await self._changed.wait()
            return BEGIN_ANEW
        except TimeoutError:
            return None
        finally:
            self._requests.remove(is_gone)

    async def silence(self) -> None:
        """Wait until it has nothing to do and does not ask for anything."""
        while True:
            self._spoke.clear()
            try:
                async with patience(SILENT_S):
                    await self._spoke.wait()
            except TimeoutError:
                at_work = self._message is not None and self._taken
                if not at_work and not self.asks:
                    return

    def kill(self, *, left: bool = False) -> None:
        """It is told to begin anew, if it asks once more. One that has `left` has done so by itself: no group's
        fault."""
        self.alive = False
        self._changed.set()
        if self._message is not None and not self._answer.done():
            self._answer.set_exception(self._lost(left=left))

    def _lost(self, *, left: bool = False) -> RewardError:
        what = "the reward worker that had this group is gone with its machine"
        return RewardWorkerError(what) if self._taken and not left else SessionLostError(what)
