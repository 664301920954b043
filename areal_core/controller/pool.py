"""Several generation servers seen as one: routing, updates, and what becomes of a server that fails.

A server that fails a phase of an update, loses a connection or answers with a server's error is not asked again: its
requests fail, so that the controller repeats them elsewhere, and it has to join again. Without torch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from areal_core.api.transcript import Transcript
from areal_core.api.wire import ServerLoad
from areal_core.controller.servers import Server, ask_each
from areal_core.controller.weight_transfer import Transfer
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import GenerationRequest, PolicyVersion

T = TypeVar("T")

logger = logging.getLogger(__name__)
_HAND_OVER_S = 10.0  # for the answers of a server that leaves to come in
_ABORT_AGAIN_S = 1.0


class GenerationPool:
    """Several named servers as one: requests go to the one with the fewest answers in flight.

    `on_change` is called whenever a server joined or left, was taken out or has other weights.
    """

    def __init__(
        self,
        *,
        answers_per_server: int,
        interruption: str = "recompute",
        transfer: str = "files",
        patience_s: float = 120.0,
        on_change: Callable[[], None] = lambda: None,
        timeline: Callable[[str], TimelineWriter] | None = None,
    ) -> None:
        """`interruption` is what an update does to running answers (generation.client); `transfer` how weights come:
        "files", or by the trainer itself (generation.transfer); `patience_s` bounds an update and the wait for a server
        to join; `timeline` is where to write down what the server of a name does, if it does not do so itself."""
        self._answers_per_server = answers_per_server
        self._interruption = interruption
        self._by_files = transfer == "files"
        self._patience_s = patience_s
        self._on_change = on_change
        self._timeline = timeline
        self._servers: dict[str, Server] = {}
        self._lost: dict[str, str] = {}  # name -> URL of those that failed and have not come back
        self._target: PolicyVersion | None = None  # what every server has or is being given
        self._updating = asyncio.Lock()  # one update at a time: a server that joins must not miss one
        self._asleep = False
        self.transfer = Transfer(self._servers, self._updating, interruption, self._remove, patience_s)
        self._joined = asyncio.Event()  # set while there is a server
        self._open: set[Transcript] = set()  # what servers are working on
        self._ending = False  # what is aborted stays so

    @property
    def version(self) -> int:
        """Lowest version loaded by any server that takes work; without servers, the version that the next one gets."""
        loaded = [server.loaded.version for server in self._servers.values() if server.loaded is not None]
        return min(loaded, default=0 if self._target is None else self._target.version)

    @property
    def lost(self) -> tuple[str, ...]:
        """URLs of servers that were taken out since they failed, or could not join: starting them again may help."""
        return tuple(self._lost.values())

    @property
    def capacity(self) -> int:
        """Answers worth having in flight at once."""
        return self._answers_per_server * len(self._servers)

    @property
    def held_tokens(self) -> int:
        """Tokens that servers have handed back, of requests that are not finished."""
        return sum(transcript.held_tokens for transcript in self._open)

    async def join(self, name: str, url: str, newest: Callable[[], PolicyVersion | None]) -> None:
        """Give a server the newest version, asked for when its turn has come, then work. It takes the place of another
        one of the same name; one that is at work already stays. Raises ServerLostError when it can't be given that
        version. Version 0 is not sent to a server that says it has it."""
        timeline = None if self._timeline is None else functools.partial(self._timeline, name)
        server = Server(name, GenerationClient(url, update_timeout_s=self._patience_s, timeline=timeline))
        try:
            async with self._updating:
                if await self._is_at_work(name, url):  # asked for again, since it took its time
                    await server.client.close()
                    return
                await self._leave(name)
                self._target = newest() or self._target
                await self._bring_up(server)
                if self._asleep:
                    await server.client.sleep()
                self._servers[name] = server
        except BaseException as error:
            await server.client.close()
            if isinstance(error, ServerLostError):
                self._lost[name] = url
            raise
        self._joined_or_not()
        self._on_change()

    async def leave(self, name: str) -> None:
        """Take a server out, if it is there. What it has sampled for its requests is kept; others go on with them."""
        async with self._updating:  # else what it has sampled under new weights might go on under old ones
            await self._leave(name)

    async def generate(self, transcript: Transcript) -> None:
        """Have the answers of a transcript finished, by whichever server has the least to do at the time: those of its
        request, or the rest of what an earlier call has left. Waits for a server to join. Raises GenerationError when
        none does, when a server refuses, and when one is lost or taken out meanwhile; the transcript keeps what is
        known by then. After `abort_all` answers are left unfinished."""
        self._open.add(transcript)
        try:
            if not transcript.begun:
                transcript.begin(await self._send(transcript.request))
            rest = [self._go_on(transcript, index) for index in transcript.unfinished()]
            failures = [error for error in await asyncio.gather(*rest, return_exceptions=True) if error is not None]
            if failures:
                raise failures[0]
        finally:
            self._open.discard(transcript)

    async def load_version(self, version: PolicyVersion) -> None:
        """Give all servers other weights, at the same time; those that fail are taken out."""
        if not self._by_files:
            self._target = version
            await self.transfer.wait(version)
            self._on_change()
            return
        async with self._updating:
            self._target = version
            stale = [server for server in self._servers.values() if server.loaded != version]
            await self._each(stale, lambda server: server.load(version, self._interruption))
        if stale:
            self._on_change()

    async def sleep(self) -> None:
        """Have all servers give their accelerators' memory back, until `wake_up`; nothing may be running."""
        async with self._updating:
            if not self._asleep:
                self._asleep = True
                await self._each(self._servers.values(), lambda server: server.client.sleep())

    async def wake_up(self) -> None:
        async with self._updating:
            if self._asleep:
                self._asleep = False
                await self._each(self._servers.values(), lambda server: server.client.wake_up())

    async def abort_all(self) -> None:
        """End all requests with the tokens that they have, for good."""
        self._ending = True
        async with self._updating:  # between two phases of an update, it would let the server go on
            await self._each(self._servers.values(), lambda server: server.client.abort_all())

    async def check(self) -> None:
        """Take out servers that do not answer."""
        await self._each(self._servers.values(), lambda server: server.client.health())

    async def loads(self) -> list[ServerLoad]:
        """What the servers do; those that do not answer are taken out."""
        return await self._each(self._servers.values(), lambda server: server.client.load())

    async def close(self) -> None:
        """Let go of all servers; they are not stopped."""
        for server in list(self._servers.values()):
            await self._remove(server, "the pool is closed", failed=False)

    async def _leave(self, name: str) -> None:
        self._lost.pop(name, None)
        server = self._servers.pop(name, None)
        if server is None:
            return
        self._joined_or_not()
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                while calls := [call for call in server.calls if not call.done()]:
                    await server.client.abort_all()
                    await asyncio.wait(calls, timeout=_ABORT_AGAIN_S)  # one on its way may arrive after the abort
        except (ServerLostError, TimeoutError) as error:
            reason = str(error) or f"no answer in {_HAND_OVER_S:g} s"
            logger.warning("generation server %s left without handing over what it had: %s", name, reason)
        await self._remove(server, "it left", failed=False)

    async def _go_on(self, transcript: Transcript, index: int) -> None:
        """Ask for the rest of an answer until it is finished: updates may interrupt it again and again."""
        while index in transcript.unfinished() and not self._ending:
            transcript.extend(index, await self._send(transcript.continuation(index), again=True))

    async def _send(self, request: GenerationRequest, *, again: bool = False) -> bytes:
        """The raw body of the answers, from the server with the least to do; `again`: it has been begun elsewhere."""
        server = await self._least_loaded()
        call = asyncio.ensure_future(server.client.generate(request))
        server.calls.add(call)
        server.answers += request.n
        if again:
            server.client.resubmitted_tokens += len(request.token_ids)
        try:
            return await call
        except ServerLostError as error:
            await self._remove(server, str(error))
            raise
        except asyncio.CancelledError:
            if server.lost and call.cancelled() and not _cancelling():
                raise ServerLostError(f"{server.name} was taken out while it served {request.request_id}") from None
            raise
        finally:
            server.calls.discard(call)
            server.answers -= request.n

    async def _least_loaded(self) -> Server:
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._servers:
                    await self._joined.wait()
        except TimeoutError:
            raise GenerationError(f"no generation server joined in {self._patience_s:g} s") from None
        return min(self._servers.values(), key=lambda server: server.answers)

    async def _is_at_work(self, name: str, url: str) -> bool:
        """Whether the server there is the one that has joined: another may have been started in its place."""
        known = self._servers.get(name)
        if known is None or known.client.url != url or known.loaded is None:
            return False
        try:
            return await known.client.loaded_version() == known.loaded.version
        except GenerationError:
            return False

    async def _bring_up(self, server: Server) -> None:
        """Give a server what the others have. It was started with the base model: version 0 is not sent to it."""
        await server.client.identify()
        if await server.client.is_sleeping():  # its controller is gone, and does not know any more
            await server.client.wake_up()
        target = self._target
        if target is None:
            return
        if target.version == 0 and await server.client.loaded_version() == 0:
            await server.client.resume()  # it may have left, or lost its controller, in a pause
            server.loaded = target
        elif self._by_files:
            await server.load(target, self._interruption)
        else:
            await server.client.reload(target)
            server.loaded = target

    async def _each(self, servers: Iterable[Server], call: Callable[[Server], Awaitable[T]]) -> list[T]:
        """Ask servers at the same time; the answers of those that gave one, while the others are taken out."""
        return list((await ask_each(servers, call, self._remove)).values())

    def _joined_or_not(self) -> None:
        self.transfer.servers_changed()
        if self._servers:
            self._joined.set()
        else:
            self._joined.clear()

    async def _remove(self, server: Server, reason: str, *, failed: bool = True) -> None:
        """Take a server out once, however many of its requests notice that it is gone."""
        if server.lost:
            return
        server.lost = True
        if self._servers.get(server.name) is server:
            del self._servers[server.name]
            if failed:
                self._lost[server.name] = server.client.url
        self._joined_or_not()
        if failed:
            logger.warning("generation server %s is taken out: %s", server.name, reason)
        for call in server.calls:
            call.cancel()
        await server.client.close()
        self._on_change()


def _cancelling() -> bool:
    """Whether the task that runs is itself being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
