"""The server registry: one state machine for all generation servers.

                 announce            join            serve             update
    (a process) ---------> ANNOUNCED ----> JOINING --------> SERVING --------> UPDATING
                                              |              | |  ^               |
                                              |        leave | |  +---- load -----+
                                              |              v |                  |
                                              |       LEAVING  | fail             |
                                              | fail     |     v                  |
                                              +----------|---> LOST <-------------+
                                                         |      |          fail
                                             fail or end |      | end
                                                         v      v
         from every state ----------- end -----------> ENDED

    event     cause                                                     applied by
    announce  a process is registered; a LOST one of its name ends      launcher, or by hand: POST /servers
    join      its predecessor has handed over; it loads model weights   GenerationPool.join
    serve     it has loaded the newest version                          GenerationPool.join
    update    it begins to load a version                               GenerationPool.load_version
    load      it has loaded the version                                 ServerRegistry.update
    leave     it gets no more work, and hands over its completions      DELETE /servers/{name}, or its successor
    fail      a request, a phase, a health check, a deadline            the caller that met the failure
    end       it left, was refused or replaced, or the controller ends  GenerationPool

SERVING and UPDATING servers are *at work*: they take requests, and their recorded version counts. A SERVING server
samples with its recorded version. An UPDATING one keeps the old version until it has loaded the new one. `GET /status`
reports LOST servers, so that their launcher kills and replaces them. A replacement is announced as the next
*incarnation* of the name. Every transition happens between two awaits of one event loop. The registry knows no routes
of servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeVar

from areal_core.errors import GenerationError
from areal_core.generation.client import GenerationClient
from areal_core.types import PolicyVersion

T = TypeVar("T")
Event = Literal["join", "serve", "update", "load", "leave", "fail", "end"]

logger = logging.getLogger(__name__)


class ServerState(Enum):
    ANNOUNCED = "announced"
    JOINING = "joining"
    SERVING = "serving"
    UPDATING = "updating"
    LEAVING = "leaving"
    LOST = "lost"
    ENDED = "ended"


_AT_WORK = (ServerState.SERVING, ServerState.UPDATING)
_GONE = (ServerState.LOST, ServerState.ENDED)
_TRANSITIONS: Mapping[Event, Mapping[ServerState, ServerState]] = {
    "join": {ServerState.ANNOUNCED: ServerState.JOINING},
    "serve": {ServerState.JOINING: ServerState.SERVING},
    "update": {ServerState.SERVING: ServerState.UPDATING},
    "load": {ServerState.UPDATING: ServerState.SERVING},
    "leave": {ServerState.SERVING: ServerState.LEAVING},
    "fail": {
        **dict.fromkeys((ServerState.JOINING, *_AT_WORK), ServerState.LOST),
        ServerState.LEAVING: ServerState.ENDED,  # the server is already leaving, so nobody replaces it
        **{state: state for state in _GONE},  # another of the server's requests failed before
    },
    "end": {state: ServerState.ENDED for state in ServerState if state is not ServerState.ENDED},
}


@dataclass(slots=True, eq=False)
class Server:
    """One incarnation of a named server: one process, from its registration to its end."""

    name: str
    client: GenerationClient
    state: ServerState = ServerState.ANNOUNCED
    loading: PolicyVersion | None = None  # while the server joins
    loaded: PolicyVersion | None = None
    joining: asyncio.Task[None] | None = None  # the task of GenerationPool._join
    completions: int = 0  # in flight
    calls: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def at_work(self) -> bool:
        return self.state in _AT_WORK

    @property
    def gone(self) -> bool:
        return self.state in _GONE


class ServerRegistry:
    """The servers of one controller that have not ended.

    Hold `exclusive` to change several servers or their model weights. It admits one update, sleep or hand-over at a
    time.
    """

    def __init__(self) -> None:
        self.exclusive = asyncio.Lock()
        self.target: PolicyVersion | None = None  # the newest version that the pool was asked to load
        self._servers: list[Server] = []  # in order of registration
        self._subscribers: list[Callable[[Server, ServerState], None]] = []
        self._changed = asyncio.Event()

    def subscribe(self, subscriber: Callable[[Server, ServerState], None]) -> None:
        """Call `subscriber(server, previous_state)` after every transition.
        An incarnation stops being `at_work`, or becomes `gone`, at most once."""
        self._subscribers.append(subscriber)

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers that have not ended."""
        return tuple(self._servers)

    @property
    def at_work(self) -> tuple[Server, ...]:
        """The servers that take requests."""
        return tuple(server for server in self._servers if server.at_work)

    @property
    def version(self) -> int:
        """Lowest version loaded by any server at work, i of Eq. 3; the target version if no server is at work."""
        loaded = [server.loaded.version for server in self._servers if server.at_work and server.loaded is not None]
        return min(loaded, default=0 if self.target is None else self.target.version)

    @property
    def lost(self) -> tuple[str, ...]:
        """URLs of failed servers without a successor, which the launcher may start again."""
        return tuple(server.url for server in self._servers if server.state is ServerState.LOST)

    def announce(self, name: str, client: GenerationClient) -> Server:
        """Register a server as the next incarnation of its name. A LOST one of this name ends."""
        for before in self.servers:
            if before.name == name and before.state is ServerState.LOST:
                self.apply(before, "end", "a new server of this name replaces it")
        server = Server(name, client)
        self._servers.append(server)
        self._notify(server, ServerState.ANNOUNCED)
        return server

    def apply(self, server: Server, event: Event, reason: str = "", *, version: PolicyVersion | None = None) -> None:
        """Apply one transition; "load" sets the server's version. Raises RuntimeError if the picture lacks it."""
        before, after = server.state, _TRANSITIONS[event].get(server.state)
        if after is None:
            raise RuntimeError(
                f"generation server {server.name} is {before.value}: the event {event!r} is not possible in this state"
            )
        if event == "load":
            server.loaded = version
        if before is after:
            return
        server.state = after
        if after is ServerState.ENDED:
            self._servers.remove(server)
        level = logging.WARNING if event == "fail" else logging.DEBUG
        what = "removed" if event == "fail" else after.value
        logger.log(level, "generation server %s is %s: %s", server.name, what, reason or event)
        self._notify(server, before)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true, checking it after every transition."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def call_each(self, servers: Iterable[Server], call: Callable[[Server], Awaitable[T]]) -> dict[Server, T]:
        """Call several servers concurrently.
        Returns the results of successful calls, in order. The state of servers whose call raises GenerationError
        becomes LOST or ENDED."""
        servers = list(servers)
        outcomes = await asyncio.gather(*map(call, servers), return_exceptions=True)
        results: dict[Server, T] = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, GenerationError):
                self.apply(server, "fail", str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[server] = outcome
        return results

    async def update(self, version: PolicyVersion, call: Callable[[Server], Awaitable[None]]) -> None:
        """Load a version into all servers at work that lack it, concurrently, while holding `exclusive`.

        Servers that fail are taken out. A cancelled update also takes out servers that are still loading, because they
        may hold half of the version."""
        async with self.exclusive:
            if self.target != version:  # a server has joined with a newer version, which is loaded next
                return
            members = [server for server in self.at_work if server.loaded != version]
            for server in members:
                self.apply(server, "update")

            async def load(server: Server) -> None:
                await call(server)
                if server.state is ServerState.UPDATING:  # else the server has failed meanwhile
                    self.apply(server, "load", version=version)

            try:
                await self.call_each(members, load)
            finally:
                for server in members:
                    if server.state is ServerState.UPDATING:
                        self.apply(server, "fail", "its weight update was interrupted")

    def _notify(self, server: Server, before: ServerState) -> None:
        self._changed.set()
        for subscriber in self._subscribers:
            subscriber(server, before)
