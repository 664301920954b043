"""The pool of generation servers: routes requests, and loads versions into all servers.

The server registry (controller/registry.py) keeps the state of each server; the pool makes the calls. A server gets
no more work if it fails an update, loses a connection or answers with a 5xx status. Then its requests fail, the
rollout controller repeats them at other servers, and the server must join again. Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from areal_core.api.patience import lag_tolerant_timeout
from areal_core.api.pending_completions import PendingCompletions, Received
from areal_core.api.wire import ServerLoad
from areal_core.controller.core.tables import ServerCounters
from areal_core.controller.registry import Server, ServerRegistry, ServerState
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient
from areal_core.generation.data_plane import DataPlane, Take
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import GenerationRequest, PolicyVersion

logger = logging.getLogger(__name__)
_HAND_OVER_S = 10.0  # limit for the responses of a server that leaves
_ABORT_RETRY_S = 1.0
_LOAD_S = 10.0  # least limit of a load that blocks the other servers
_LOADS_ALONE = 2  # loads of a joining server without the lock, before it blocks further updates
Newest = Callable[[], PolicyVersion | None]


@dataclass(eq=False, kw_only=True)
class GenerationPool:
    """Several named servers as one engine.
    A request goes to the server with the fewest completions in flight."""

    completions_per_server: int
    interruption: str = "recompute"  # what an update does to running completions (generation.client)
    adapters: bool = False  # versions are LoRA adapters to the base model
    patience_s: float = 120.0  # limit of an update, and of the wait for a server to join
    timeline: Callable[[str], TimelineWriter] | None = None  # by server name, for servers that write no timeline
    counters: ServerCounters = field(  # tokens that the servers have sampled
        default_factory=lambda: ServerCounters(sqlite3.connect(":memory:", isolation_level=None))
    )
    token: str | None = None  # token that servers require in every request

    def __post_init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None  # called when completions have ended
        self.registry = ServerRegistry()
        self.registry.subscribe(self._on_transition)
        self._asleep = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # tasks that continue if their caller is cancelled
        self._open: dict[PendingCompletions, dict[str, Server]] = {}  # servers of open requests, by request id
        self._given_up: set[PendingCompletions] = set()  # open requests that were cancelled and are not continued
        self._plane = DataPlane()
        self._ending = False  # the run ends: aborted completions are not continued

    @property
    def version(self) -> int:
        """Lowest version loaded by any server that takes requests; the target version if there is none."""
        return self.registry.version

    @property
    def room(self) -> int:
        """How many more completions the servers can run at once."""
        return sum(max(0, self.completions_per_server - server.completions) for server in self.registry.at_work)

    # -- requests ----------------------------------------------------------------------------------------------

    async def generate(self, pending: PendingCompletions) -> None:
        """Generate the unfinished completions of `pending` on the least loaded servers.

        Waits for a server to join. Raises GenerationError if none joins, or if a server refuses, is lost or is taken
        out; `pending` keeps the tokens received so far. After `abort_all` it leaves completions unfinished. If
        cancelled, it first ends the requests at the servers, so that `pending` receives their tokens."""
        self._open[pending] = {}
        work = asyncio.ensure_future(self._finish(pending))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(self._give_up(pending, work))
            while not ending.done():  # bounded; a second cancel must not stop the count of sampled tokens
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ending])
            ending.result()
            raise
        finally:
            del self._open[pending]

    async def abort_all(self) -> None:
        """End all requests for good; completions keep their tokens."""
        self._ending = True
        async with self.registry.exclusive:  # an update would resume the server between two of its phases
            await self.registry.call_each(self.registry.at_work, lambda server: server.client.abort_all())

    async def _finish(self, pending: PendingCompletions) -> None:
        """Generate all unfinished completions, and raise the first failure once all have ended.
        A failure of one completion does not stop the others."""
        if pending.begun:
            work = [asyncio.create_task(self._continue(pending, index)) for index in pending.unfinished()]
        else:
            work = self._begin(pending)
        try:
            for one in work:  # includes tasks added during the loop
                await asyncio.wait([one])
            for one in work:
                one.result()
        finally:
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def _begin(self, pending: PendingCompletions) -> list[asyncio.Task[None]]:
        """Request all completions from one server, which computes the prompt's KV cache once.
        Returns the list of tasks. It grows by one task for each interrupted completion, which is continued at once."""

        def take(indices: tuple[int, ...], received: Received) -> None:
            pending.take(indices, received)
            for index in sorted({*indices} & {*pending.unfinished()}):
                work.append(asyncio.create_task(self._continue(pending, index)))

        work = [asyncio.create_task(self._send(pending, pending.request, take))]
        return work

    async def _give_up(self, pending: PendingCompletions, work: asyncio.Future[None]) -> None:
        """Cancel the requests of `pending`, which keeps the returned tokens.
        Takes out servers that do not respond."""
        self._given_up.add(pending)
        serving = self._open[pending]
        try:
            async with lag_tolerant_timeout(_HAND_OVER_S):
                while serving and not work.done():
                    await self.registry.call_each(set(serving.values()), lambda server: server.client.abort([*serving]))
                    await asyncio.wait([work], timeout=_ABORT_RETRY_S)  # a request may arrive after the abort
        except TimeoutError:
            for request_id, server in list(serving.items()):
                self.registry.apply(server, "fail", f"it did not return {request_id} within {_HAND_OVER_S:g} s")
        finally:
            work.cancel()  # of requests that still wait for a server
            await asyncio.gather(work, return_exceptions=True)
            self._given_up.discard(pending)

    async def _reported(self, servers: Iterable[Server]) -> list[ServerLoad]:
        accounted = self.counters.accounted()

        async def report(server: Server) -> ServerLoad:
            load = await server.client.load()
            # Report each server at once: if it is lost while others respond, its allowance starts from this report.
            self.counters.report(server.name, load.rollout_tokens, accounted)
            return load

        return [*(await self.registry.call_each(servers, report)).values()]

    async def _continue(self, pending: PendingCompletions, index: int) -> None:
        """Continue a completion until it is finished. Updates may interrupt it several times."""
        while index in pending.unfinished() and not self._ending and pending not in self._given_up:
            request = pending.continuation(index)

            def take(_: tuple[int, ...], received: Received) -> None:
                pending.take([index], received)

            await self._send(pending, request, take, resubmitted=pending.begun)

    async def _send(
        self, pending: PendingCompletions, request: GenerationRequest, take: Take, *, resubmitted: bool = False
    ) -> None:
        """Send a request to the least loaded server; `take` gets each completion as it ends.
        `resubmitted` marks the continuation of an interrupted completion."""
        server, left = await self._least_loaded(), request.n
        pending.sent = True
        unreadable: list[GenerationError] = []  # errors of single parts; the other parts are still taken and counted

        def taken(indices: tuple[int, ...], received: Received) -> None:
            nonlocal left
            left -= len(indices)
            server.completions -= len(indices)
            try:
                take(indices, received)
            except GenerationError as error:
                unreadable.append(error)
            self.freed()

        call = asyncio.ensure_future(server.client.generate(request, taken))
        server.calls.add(call)
        self._open[pending][request.request_id] = server
        server.completions += request.n
        if resubmitted:
            server.client.resubmitted_tokens += len(request.token_ids)
        try:
            await call
            if unreadable:
                raise unreadable[0]
        except ServerLostError as error:
            self.registry.apply(server, "fail", str(error))
            raise
        except asyncio.CancelledError:
            if server.gone and call.cancelled() and not _cancelling():
                raise ServerLostError(f"{server.name} was removed while it served {request.request_id}") from None
            raise
        finally:
            server.calls.discard(call)
            server.completions -= left
            del self._open[pending][request.request_id]

    async def _least_loaded(self) -> Server:
        try:
            async with asyncio.timeout(self.patience_s):
                await self.registry.until(lambda: self.registry.at_work)
        except TimeoutError:
            raise GenerationError(f"no generation server joined within {self.patience_s:g} s") from None
        return min(self.registry.at_work, key=lambda server: server.completions)

    def _on_transition(self, server: Server, before: ServerState) -> None:
        """When a server becomes LOST or ENDED, cancel its requests and close its client."""
        if server.gone and before not in (ServerState.LOST, ServerState.ENDED):
            for call in server.calls:
                call.cancel()
            if before in (ServerState.SERVING, ServerState.UPDATING, ServerState.LEAVING) and not self._closed:
                self.counters.end(server.name, uncounted=server.client.unreported_tokens)
            self._start(server.client.close())

    # -- versions ----------------------------------------------------------------------------------------------

    @property
    def loading(self) -> set[int]:
        """Versions that servers load or will load; their files must stay."""
        found = [self.registry.target, *(server.loading for server in self.registry.servers)]
        return {version.version for version in found if version is not None}

    async def load_version(self, version: PolicyVersion) -> None:
        """Load a version into all servers concurrently; takes out those that fail.
        The load continues if its caller is cancelled, so that no update stays half done."""
        self.registry.target = version
        load = self.registry.update(version, lambda server: server.client.load_version(version, self.interruption))
        await asyncio.shield(self._start(load))

    # -- servers -----------------------------------------------------------------------------------------------

    async def join(self, name: str, url: str, newest: Newest, *, stager: str | None = None) -> None:
        """Make a server load the newest version and take requests.
        It replaces another server of the same name.

        `newest` is called when the server's turn has come. A server that is already at work stays. A server that
        already holds version 0 does not load it again. `stager` is the URL of the process that fetches versions onto
        the server's machine. Raises ServerLostError if the server can't load the version, or if another server of this
        name registers meanwhile. The join continues if its caller is cancelled. A second call waits for the same
        join."""
        joining = self._joining(name)
        task = next((task for server, task in joining if server.url == url), None)
        if task is None:
            for _, other in joining:
                other.cancel()
            timeline = None if self.timeline is None else functools.partial(self.timeline, name)
            client = GenerationClient(
                url,
                token=self.token,
                stager=stager,
                adapters=self.adapters,
                update_timeout_s=self.patience_s,
                timeline=timeline,
                plane=self._plane,
            )
            server = self.registry.announce(name, client)
            task = server.joining = self._start(self._join(server, newest))
            task.add_done_callback(functools.partial(self._joined, server))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not _cancelling():
                raise ServerLostError(f"{name} at {url} was removed before it had joined") from None
            raise

    async def leave(self, name: str) -> None:
        """Take out a server, if there is one of this name. Other servers continue its completions."""
        for _, task in self._joining(name):
            task.cancel()
        async with self.registry.exclusive:  # else another server may continue them with older model weights
            await self._retire(name)

    async def sleep(self) -> None:
        """Make all servers free their accelerators' memory until `wake_up`. No request may be running."""
        async with self.registry.exclusive:
            if not self._asleep:
                self._asleep = True
                await self.registry.call_each(self.registry.at_work, lambda server: server.client.sleep())

    async def wake_up(self) -> None:
        async with self.registry.exclusive:
            if self._asleep:
                self._asleep = False
                await self.registry.call_each(self.registry.at_work, lambda server: server.client.wake_up())

    async def check(self) -> None:
        """Take out servers that do not respond."""
        await self.registry.call_each(self.registry.at_work, lambda server: server.client.health())

    async def loads(self) -> list[ServerLoad]:
        """The load of every server. Takes out servers that do not respond."""
        return await self._reported(self.registry.at_work)

    async def close(self) -> None:
        """Close the clients of all servers.
        The servers keep running, and count tokens for the next controller."""
        self._closed = True
        for server in self.registry.servers:
            if server.joining is not None:
                server.joining.cancel()
            self.registry.apply(server, "end", "the pool is closed")
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._plane.close()

    def _joining(self, name: str) -> list[tuple[Server, asyncio.Task[None]]]:
        """Servers of a name that do not serve yet, and their join tasks."""
        servers = [server for server in self.registry.servers if server.name == name]
        return [(one, one.joining) for one in servers if one.joining is not None and not one.joining.done()]

    async def _join(self, server: Server, newest: Newest) -> None:
        """Load the newest version into a server and put it to work.

        The server loads without `exclusive`, so that a slow or hanging server does not block updates of the others. If
        a newer version appeared meanwhile, it loads again. After _LOADS_ALONE loads it holds `exclusive` for one more
        load, which may take as long as the loads before, and at least _LOAD_S seconds."""
        registry = self.registry
        async with registry.exclusive:
            known = next((one for one in registry.at_work if one.name == server.name), None)
            if known is not None and known.url == server.url and await self._is_unchanged(known):
                return
            await self._retire(server.name)
            registry.apply(server, "join")
        await server.client.identify()
        if await server.client.is_sleeping():  # an earlier controller put the server to sleep
            await server.client.wake_up()
        load = await server.client.load()
        if load.running or load.waiting:  # requests of an earlier controller that died
            await server.client.abort_all()
        clock = asyncio.get_running_loop().time
        start = clock()
        for _ in range(_LOADS_ALONE):
            counted = await self._load_target(server, newest)
            async with registry.exclusive:
                if server.loaded == registry.target:
                    await self._serve(server, counted)
                    return
        limit_s = max(_LOAD_S, clock() - start)
        try:
            async with registry.exclusive, lag_tolerant_timeout(limit_s):
                await self._serve(server, await self._load_target(server, newest))
        except TimeoutError:
            raise ServerLostError(f"{server.name}: it did not load the newest version within {limit_s:g} s") from None

    async def _serve(self, server: Server, counted: int) -> None:
        self.counters.join(server.name, server.url, counted)
        if self._asleep:
            await server.client.sleep()
        self.registry.apply(server, "serve")

    def _joined(self, server: Server, task: asyncio.Task[None]) -> None:
        """Handle the end of `_join`: a server that does not serve yet is lost or has ended."""
        error = None if task.cancelled() else task.exception()
        if server.state in (ServerState.ANNOUNCED, ServerState.JOINING):
            event = "fail" if isinstance(error, ServerLostError) else "end"
            self.registry.apply(server, event, str(error or "removed, or already serving"))

    async def _is_unchanged(self, server: Server) -> bool:
        """Whether the process at a server's URL is still the one that joined."""
        try:
            return server.loaded is not None and await server.client.loaded_version() == server.loaded.version
        except GenerationError:
            return False

    async def _load_target(self, server: Server, newest: Newest) -> int:
        """Load the target version into a joining server.
        Returns the rollout tokens that the server has counted. Version 0, the base model, is not loaded again into a
        server that was started with it."""
        target = self.registry.target = newest() or self.registry.target
        if target is not None and server.loaded != target:
            server.loading = target
            try:
                if target.version == 0 and await server.client.loaded_version() == 0:
                    await server.client.resume()  # it may be paused since it left or lost its controller
                else:
                    await server.client.load_version(target, self.interruption)
                server.loaded = target
            finally:
                server.loading = None
        return (await server.client.load()).rollout_tokens

    async def _retire(self, name: str) -> None:
        """Make the servers of a name hand over their completions, then end them; a lost one just ends."""
        for server in self.registry.servers:
            if server.name == name and server.state in (ServerState.SERVING, ServerState.LEAVING):
                await self._hand_over(server)
            if server.name == name and server.state in (ServerState.LEAVING, ServerState.LOST):
                self.registry.apply(server, "end", "it left")

    async def _hand_over(self, server: Server) -> None:
        if server.state is ServerState.SERVING:
            self.registry.apply(server, "leave")
        try:
            async with lag_tolerant_timeout(_HAND_OVER_S):
                while calls := [call for call in server.calls if not call.done()]:
                    await server.client.abort_all()
                    await asyncio.wait(calls, timeout=_ABORT_RETRY_S)  # a request may arrive after the abort
                await self._reported([server])
        except (GenerationError, TimeoutError) as error:
            reason = str(error) or f"no response in {_HAND_OVER_S:g} s"
            logger.warning(
                "generation server %s left without returning its unfinished completions: %s", server.name, reason
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _cancelling() -> bool:
    """Whether the current task is itself being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
