"""A reward worker of another machine, as the controller sees it: it asks for work and brings its answers.

    ask: message 1 --> waits here --> response to its request --> worked on --> the next request: answer 1, and so on

A request may come twice, since what it brings or takes may have got lost: messages are counted.
"""

from __future__ import annotations

import asyncio

from areal_core.api.patience import patience
from areal_core.errors import SessionLostError
from areal_core.rewards.messages import BEGIN_ANEW, Outcome, decode_outcome, encode_work
from areal_core.rewards.worker import Arrived

SILENT_S = 10.0  # without a request, after which a worker that has nothing to do is gone


class RemoteWorker:
    """One life of a worker, between two losses of what is suspended in it."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.alive = True
        self.forgotten: list[int] = []  # groups suspended in it that are given up
        self._number = 0  # messages so far
        self._message: bytes | None = None  # the last one, until its answer is here or given up
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._requests = 0  # of it, that wait here
        self._changed = asyncio.Event()
        self._spoke = asyncio.Event()

    async def ask(self, message: Arrived, timeout_s: float) -> Outcome:
        """As WorkerProcess.ask. The limit is kept where the worker is; what has not come soon after it is lost: raises
        SessionLostError."""
        forgotten, self.forgotten = self.forgotten, []
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._message = encode_work(self._number, forgotten, message)
        self._changed.set()
        try:
            async with patience(timeout_s + SILENT_S):
                return decode_outcome(await self._answer)
        except TimeoutError:
            raise _gone() from None
        finally:
            self._message = None

    async def exchange(self, answered: int, answer: bytes, timeout_s: float) -> bytes | None:
        """See RewardPool.exchange."""
        if self._message is not None and answered == self._number and not self._answer.done():
            self._answer.set_result(answer)
        self._requests += 1
        self._spoke.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self.alive:
                    if self._message is not None and self._number > answered:
                        return self._message
                    self._changed.clear()
                    await self._changed.wait()
            return BEGIN_ANEW
        except TimeoutError:
            return None
        finally:
            self._requests -= 1

    async def silence(self) -> None:
        """Wait until it has nothing to do and does not ask for anything."""
        while True:
            self._spoke.clear()
            try:
                async with patience(SILENT_S):
                    await self._spoke.wait()
            except TimeoutError:
                if self._message is None and not self._requests:
                    return

    def kill(self) -> None:
        """It is told to begin anew, if it asks once more."""
        self.alive = False
        self._changed.set()
        if self._message is not None and not self._answer.done():
            self._answer.set_exception(_gone())


def _gone() -> SessionLostError:
    return SessionLostError("the reward worker that had this group is gone with its machine")
