"""Generation servers seen as one engine: requests are routed to them, versions loaded into them all.

What becomes of each server is the registry's (controller/registry.py); this asks the servers what follows from it. A
server that fails a phase of an update, loses a connection or answers with a server's error is not asked again: its
requests fail, so that the controller repeats them elsewhere, and it has to join again. Without torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from aiohttp import web

from areal_core.api.transcript import Transcript
from areal_core.api.wire import ServerLoad
from areal_core.controller.registry import Server, ServerRegistry, ServerState, Update
from areal_core.controller.weight_transfer import Transfer
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient
from areal_core.rollout.counters import ServerCounters
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import GenerationRequest, PolicyVersion

logger = logging.getLogger(__name__)
_HAND_OVER_S = 10.0  # for the answers of a server that leaves to come in
_ABORT_AGAIN_S = 1.0
Newest = Callable[[], PolicyVersion | None]


class GenerationPool:
    """Several named servers as one: requests go to the one with the fewest answers in flight."""

    def __init__(
        self,
        *,
        completions_per_server: int,
        interruption: str = "recompute",
        transfer: str = "files",
        patience_s: float = 120.0,
        timeline: Callable[[str], TimelineWriter] | None = None,
        counters: ServerCounters | None = None,
    ) -> None:
        """`interruption` is what an update does to running answers (generation.client); `transfer` how weights come:
        "files", or by the trainer itself (generation.transfer); `patience_s` bounds an update and the wait for a server
        to join; `timeline` is where to write down what the server of a name does, if it does not do so itself;
        `counters` keep what the servers have counted."""
        self._completions_per_server = completions_per_server
        self._interruption = interruption
        self._by_files = transfer == "files"
        self._patience_s = patience_s
        self._timeline = timeline
        self.registry = ServerRegistry()
        self.registry.subscribe(self._let_go)
        self.transfer = Transfer(self.registry, interruption, patience_s)
        self._asleep = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # what goes on whatever becomes of the one who asked for it
        self._open: dict[Transcript, dict[str, Server]] = {}  # what servers are working on, by the ids of requests
        self._given_up: set[Transcript] = set()  # of these, the ones that are not gone on with
        self._counters = counters or ServerCounters(sqlite3.connect(":memory:", isolation_level=None))
        self._ending = False  # what is aborted stays so

    @property
    def version(self) -> int:
        """Lowest version loaded by any server that takes work; without any, the newest that was asked for."""
        return self.registry.version

    @property
    def lost(self) -> tuple[str, ...]:
        """URLs of servers that were taken out since they failed, or could not join: starting them again may help."""
        return self.registry.lost

    @property
    def capacity(self) -> int:
        """Answers worth having in flight at once."""
        return self._completions_per_server * len(self.registry.at_work)

    # -- requests ----------------------------------------------------------------------------------------------

    async def generate(self, transcript: Transcript) -> None:
        """Have the answers of a transcript finished, by whichever server has the least to do at the time: those of its
        request, or the rest of what an earlier call has left. Waits for a server to join. Raises GenerationError when
        none does, when a server refuses, and when one is lost or taken out meanwhile; the transcript keeps what is
        known by then. After `abort_all` answers are left unfinished. When cancelled, it has servers end what they do
        first: the transcript keeps what they have sampled."""
        self._open[transcript] = {}
        work = asyncio.ensure_future(self._finish(transcript))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(self._give_up(transcript, work))
            while not ending.done():  # it is bounded: nothing may keep it from counting what was sampled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ending])
            ending.result()
            raise
        finally:
            del self._open[transcript]

    async def abort_all(self) -> None:
        """End all requests with the tokens that they have, for good."""
        self._ending = True
        async with self.registry.exclusive:  # between two phases of an update, it would let the server go on
            await self.registry.ask(self.registry.at_work, lambda server: server.client.abort_all())

    async def _finish(self, transcript: Transcript) -> None:
        if not transcript.begun:
            transcript.begin(await self._send(transcript, transcript.request))
        rest = [self._go_on(transcript, index) for index in transcript.unfinished()]
        failures = [error for error in await asyncio.gather(*rest, return_exceptions=True) if error is not None]
        if failures:
            raise failures[0]

    async def _give_up(self, transcript: Transcript, work: asyncio.Future[None]) -> None:
        """End the requests of a transcript; it keeps what servers hand over. One that does not is taken out."""
        self._given_up.add(transcript)
        serving = self._open[transcript]
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                while serving and not work.done():
                    await self.registry.ask(set(serving.values()), lambda server: server.client.abort([*serving]))
                    await asyncio.wait([work], timeout=_ABORT_AGAIN_S)  # one on its way may arrive after the abort
        except TimeoutError:
            for request_id, server in list(serving.items()):
                self.registry.apply(server, "fail", f"it did not hand {request_id} over in {_HAND_OVER_S:g} s")
        finally:
            work.cancel()  # what waits for a server
            await asyncio.gather(work, return_exceptions=True)
            self._given_up.discard(transcript)

    async def _reported(self, servers: Iterable[Server]) -> list[ServerLoad]:
        accounted = self._counters.accounted()
        loads = await self.registry.ask(servers, lambda server: server.client.load())
        for server, load in loads.items():
            self._counters.report(server.name, load.rollout_tokens, accounted)
        return list(loads.values())

    async def _go_on(self, transcript: Transcript, index: int) -> None:
        """Ask for the rest of an answer until it is finished: updates may interrupt it again and again."""
        while index in transcript.unfinished() and not self._ending and transcript not in self._given_up:
            transcript.extend(index, await self._send(transcript, transcript.continuation(index), again=True))

    async def _send(self, transcript: Transcript, request: GenerationRequest, *, again: bool = False) -> bytes:
        """The raw body of the answers, from the server with the least to do; `again`: it has been begun elsewhere."""
        server = await self._least_loaded()
        call = asyncio.ensure_future(server.client.generate(request))
        server.calls.add(call)
        self._open[transcript][request.request_id] = server
        server.completions += request.n
        if again:
            server.client.resubmitted_tokens += len(request.token_ids)
        try:
            return await call
        except ServerLostError as error:
            self.registry.apply(server, "fail", str(error))
            raise
        except asyncio.CancelledError:
            if server.gone and call.cancelled() and not _cancelling():
                raise ServerLostError(f"{server.name} was taken out while it served {request.request_id}") from None
            raise
        finally:
            server.calls.discard(call)
            server.completions -= request.n
            del self._open[transcript][request.request_id]

    async def _least_loaded(self) -> Server:
        try:
            async with asyncio.timeout(self._patience_s):
                await self.registry.until(lambda: self.registry.at_work)
        except TimeoutError:
            raise GenerationError(f"no generation server joined in {self._patience_s:g} s") from None
        return min(self.registry.at_work, key=lambda server: server.completions)

    def _let_go(self, server: Server, before: ServerState) -> None:
        """An incarnation has come to its end: its requests fail, nobody asks it for anything more."""
        if server.gone and before not in (ServerState.LOST, ServerState.ENDED):
            for call in server.calls:
                call.cancel()
            if before in (ServerState.SERVING, ServerState.UPDATING, ServerState.LEAVING) and not self._closed:
                self._counters.end(server.name, uncounted=server.client.unreported_tokens)
            self._start(server.client.close())

    # -- versions ----------------------------------------------------------------------------------------------

    async def load_version(self, version: PolicyVersion) -> None:
        """Give all servers other weights, at the same time; those that fail are taken out. A caller that is cancelled
        leaves it to go on: half an update is none."""
        self.registry.target = version
        if self._by_files:
            await asyncio.shield(self._start(self._update(version)))
        else:
            await self.transfer.wait(version)

    async def _update(self, version: PolicyVersion) -> None:
        async with Update(self.registry, version, self._patience_s) as update:

            async def load(server: Server) -> None:
                await server.client.load_version(version, self._interruption)
                update.loaded(server)

            await update.phase(load)

    # -- servers -----------------------------------------------------------------------------------------------

    async def join(self, name: str, url: str, newest: Newest) -> None:
        """Give a server the newest version, asked for when its turn has come, then work. It takes the place of another
        one of the same name; one that is at work already stays. Raises ServerLostError when it can't be given that
        version, or another one was announced meanwhile. Version 0 is not sent to a server that says it has it.

        A caller that is cancelled leaves it to go on; who asks again waits for the same."""
        joining = self._joining(name)
        task = next((task for server, task in joining if server.url == url), None)
        if task is None:
            for _, other in joining:
                other.cancel()
            timeline = None if self._timeline is None else functools.partial(self._timeline, name)
            client = GenerationClient(url, update_timeout_s=self._patience_s, timeline=timeline)
            server = self.registry.announce(name, client)
            task = server.joining = self._start(self._join(server, newest))
            task.add_done_callback(functools.partial(self._joined, server))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not _cancelling():
                raise ServerLostError(f"{name} at {url} was taken out before it had joined") from None
            raise

    async def leave(self, name: str) -> None:
        """Take a server out, if it is there. What it has sampled for its requests is kept; others go on with them."""
        for _, task in self._joining(name):
            task.cancel()
        async with self.registry.exclusive:  # else what it sampled under new weights might go on under old ones
            await self._make_way(name)

    async def sleep(self) -> None:
        """Have all servers give their accelerators' memory back, until `wake_up`; nothing may be running."""
        async with self.registry.exclusive:
            if not self._asleep:
                self._asleep = True
                await self.registry.ask(self.registry.at_work, lambda server: server.client.sleep())

    async def wake_up(self) -> None:
        async with self.registry.exclusive:
            if self._asleep:
                self._asleep = False
                await self.registry.ask(self.registry.at_work, lambda server: server.client.wake_up())

    async def check(self) -> None:
        """Take out servers that do not answer."""
        await self.registry.ask(self.registry.at_work, lambda server: server.client.health())

    async def loads(self) -> list[ServerLoad]:
        """What the servers do; those that do not answer are taken out."""
        return await self._reported(self.registry.at_work)

    async def close(self) -> None:
        """Let go of all servers; they are not stopped, and go on counting for the controller that comes next."""
        self._closed = True
        for server in self.registry.servers:
            if server.joining is not None:
                server.joining.cancel()
            self.registry.apply(server, "end", "the pool is closed")
        self.transfer.abandon("the pool is closed")
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _joining(self, name: str) -> list[tuple[Server, asyncio.Task[None]]]:
        """Servers of a name that do not serve yet, and the work that makes them."""
        servers = [server for server in self.registry.servers if server.name == name]
        return [(one, one.joining) for one in servers if one.joining is not None and not one.joining.done()]

    async def _join(self, server: Server, newest: Newest) -> None:
        """`exclusive` is not held while a server gets its first weights: one that takes its time holds up no update of
        the others. What they have got meanwhile it gets in a turn of its own."""
        registry = self.registry
        async with registry.exclusive:
            known = next((one for one in registry.at_work if one.name == server.name), None)
            if known is not None and known.url == server.url and await self._is_unchanged(known):
                return
            await self._make_way(server.name)
            registry.apply(server, "join")
        await server.client.identify()
        if await server.client.is_sleeping():  # its controller is gone, and does not know any more
            await server.client.wake_up()
        await self._give_target(server, newest)
        async with registry.exclusive:
            await self._give_target(server, newest)
            self._counters.join(server.name, server.url, (await server.client.load()).rollout_tokens)
            if self._asleep:
                await server.client.sleep()
            registry.apply(server, "serve")

    def _joined(self, server: Server, task: asyncio.Task[None]) -> None:
        """The end of `_join`: without having got to serve, its server is none."""
        error = None if task.cancelled() else task.exception()
        if server.state in (ServerState.ANNOUNCED, ServerState.JOINING):
            event = "fail" if isinstance(error, ServerLostError) else "end"
            self.registry.apply(server, event, str(error or "taken out, or at work already"))

    async def _is_unchanged(self, server: Server) -> bool:
        """Whether what is at a server's URL is still what joined: another may have been started in its place."""
        try:
            return server.loaded is not None and await server.client.loaded_version() == server.loaded.version
        except GenerationError:
            return False

    async def _give_target(self, server: Server, newest: Newest) -> None:
        """Give a server that joins what all are to have. It was started with the base model: version 0 is not sent to
        it."""
        target = self.registry.target = newest() or self.registry.target
        if target is None or server.loaded == target:
            return
        if target.version == 0 and await server.client.loaded_version() == 0:
            await server.client.resume()  # it may have left, or lost its controller, in a pause
        elif self._by_files:
            await server.client.load_version(target, self._interruption)
        else:
            await server.client.reload(target)
        server.loaded = target

    async def _make_way(self, name: str) -> None:
        """Have what was at work under a name hand over its requests, and end; what is lost just ends."""
        for server in self.registry.servers:
            if server.name == name and server.state in (ServerState.SERVING, ServerState.LEAVING):
                await self._hand_over(server)
            if server.name == name and server.state in (ServerState.LEAVING, ServerState.LOST):
                self.registry.apply(server, "end", "it left")

    async def _hand_over(self, server: Server) -> None:
        if server.state is ServerState.SERVING:
            self.registry.apply(server, "leave")
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                while calls := [call for call in server.calls if not call.done()]:
                    await server.client.abort_all()
                    await asyncio.wait(calls, timeout=_ABORT_AGAIN_S)  # one on its way may arrive after the abort
                await self._reported([server])
        except (GenerationError, TimeoutError) as error:
            reason = str(error) or f"no answer in {_HAND_OVER_S:g} s"
            logger.warning("generation server %s left without handing over what it had: %s", server.name, reason)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _cancelling() -> bool:
    """Whether the task that runs is itself being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def server_routes(servers: GenerationPool, newest: Newest) -> list[web.RouteDef]:
    """How launchers, and people, have servers join and leave: `newest` is the version that a server is given."""

    async def join(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            async with asyncio.timeout(body.get("timeout_s")):
                await servers.join(body["name"], body["url"], newest)
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response({})

    async def leave(request: web.Request) -> web.Response:
        await servers.leave(request.match_info["name"])
        return web.json_response({})

    return [web.post("/servers", join), web.delete("/servers/{name}", leave)]
