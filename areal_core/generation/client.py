"""Clients of generation servers: one server, and several seen as one. Without torch.

An update of weights goes through the same phases at every server: start, stage, pause, finish, resume. A server that
fails one of them, loses a connection or answers with a server's error is not asked again: its requests fail, so that
the controller repeats them elsewhere, and it has to join again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import orjson

from areal_core.errors import GenerationError, ServerLostError
from areal_core.types import GenerationRequest, PolicyVersion
from areal_core.wire import ServerLoad, encode_request

T = TypeVar("T")

logger = logging.getLogger(__name__)
_CONTROL_TIMEOUT_S = 10.0  # for what a server answers between two decode steps


class GenerationClient:
    """One server. Every method raises ServerLostError when the server can't be reached, does not answer in time or
    answers with a 5xx status."""

    def __init__(self, url: str, *, update_timeout_s: float = 120.0) -> None:
        self.url = url
        self._update_timeout_s = update_timeout_s
        # Without a bound on connections: requests wait at the server, which knows best when to run them.
        self._session = aiohttp.ClientSession(
            base_url=url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONTROL_TIMEOUT_S),
        )

    async def generate(self, request: GenerationRequest) -> bytes:
        """The raw body of the answers (wire.parse_generation reads it). Raises GenerationError when the server refuses
        the request. Waits as long as the server takes; when cancelled, the server aborts the request."""
        return await self._call("POST", "/inference/v1/generate", encode_request(request), timeout_s=None)

    async def load_version(self, version: PolicyVersion, *, interrupt: bool) -> None:
        """Have the server go on with other weights: at once (`interrupt`), computing the KV cache of running answers
        again, or when running answers are finished. Raises ServerLostError if any phase fails."""
        update = {"update_info": {"path": version.path, "sha256": version.sha256}}
        mode = "keep" if interrupt else "wait"
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await self._control("POST", "/start_weight_update")
                await self._control("POST", "/update_weights", update, timeout_s=None)
                await self._control("POST", f"/pause?mode={mode}&clear_cache=true", timeout_s=None)
                await self._control("POST", "/finish_weight_update", {"weight_version": str(version.version)})
                await self._control("POST", "/resume")
        except TimeoutError:
            raise ServerLostError(
                f"{self.url}: version {version.version} was not loaded in {self._update_timeout_s:g} s"
            ) from None
        except ServerLostError:
            raise
        except GenerationError as error:
            raise ServerLostError(f"version {version.version} was not loaded: {error}") from None

    async def abort_all(self) -> None:
        """End all requests with the tokens that they have; the server goes on with whatever comes next."""
        await self._control("POST", "/pause?mode=abort&clear_cache=false")
        await self._control("POST", "/resume")

    async def load(self) -> ServerLoad:
        return ServerLoad(**orjson.loads(await self._control("GET", "/load")))

    async def loaded_version(self) -> int:
        return int(orjson.loads(await self._control("GET", "/weight_info"))["weight_version"])

    async def health(self) -> None:
        await self._control("GET", "/health")

    async def close(self) -> None:
        await self._session.close()

    async def _control(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = _CONTROL_TIMEOUT_S
    ) -> bytes:
        return await self._call(method, path, None if body is None else orjson.dumps(body), timeout_s=timeout_s)

    async def _call(self, method: str, path: str, body: bytes | None, *, timeout_s: float | None) -> bytes:
        if self._session.closed:
            raise ServerLostError(f"{self.url}{path}: the client is closed")
        try:
            async with asyncio.timeout(timeout_s), self._session.request(method, path, data=body) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise ServerLostError(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        except TimeoutError:
            raise ServerLostError(f"{self.url}{path}: no answer in {timeout_s} s") from None
        if response.status == 200:
            return answer
        kind = ServerLostError if response.status >= 500 else GenerationError
        raise kind(f"{self.url}{path}: {response.status}: {answer.decode(errors='replace'):.500}")


@dataclass(slots=True, eq=False)
class _Server:
    name: str
    client: GenerationClient
    loaded: PolicyVersion | None = None
    answers: int = 0  # in flight
    calls: set[asyncio.Future[bytes]] = field(default_factory=set)
    lost: bool = False


class GenerationPool:
    """Several named servers as one: requests go to the one with the fewest answers in flight.

    `on_change` is called whenever a server joined or left, was taken out or has other weights.
    """

    def __init__(
        self,
        *,
        answers_per_server: int,
        interrupt: bool = True,
        patience_s: float = 120.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`patience_s` bounds an update and the wait for a server to join."""
        self._answers_per_server = answers_per_server
        self._interrupt = interrupt
        self._patience_s = patience_s
        self._on_change = on_change
        self._servers: dict[str, _Server] = {}
        self._lost: dict[str, str] = {}  # name -> URL of those that failed and have not come back
        self._target: PolicyVersion | None = None  # what every server has or is being given
        self._updating = asyncio.Lock()  # one update at a time: a server that joins must not miss one
        self._joined = asyncio.Event()  # set while there is a server

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

    async def join(self, name: str, url: str, newest: Callable[[], PolicyVersion | None]) -> None:
        """Give a server the newest version, asked for when its turn has come, then work. It takes the place of one of
        the same name. Raises ServerLostError when it can't be given that version. Version 0 is not sent to a server
        that says it has it."""
        await self.leave(name)
        self._lost.pop(name, None)
        server = _Server(name, GenerationClient(url, update_timeout_s=self._patience_s))
        try:
            async with self._updating:
                self._target = newest() or self._target
                await self._bring_up(server)
                await self.leave(name)  # a join of the same name may have overtaken this one
                self._servers[name] = server
        except BaseException as error:
            await server.client.close()
            if isinstance(error, ServerLostError):
                self._lost[name] = url
            raise
        self._joined.set()
        self._on_change()

    async def leave(self, name: str) -> None:
        """Take a server out, if it is there; its requests fail."""
        server = self._servers.get(name)
        if server is not None:
            await self._remove(server, "it left", failed=False)

    async def generate(self, request: GenerationRequest) -> bytes:
        """The raw body of the answers, from the server with the least to do. Waits for a server to join. Raises
        GenerationError when none does, when the server refuses, and when it is lost or taken out meanwhile."""
        server = await self._least_loaded()
        call = asyncio.ensure_future(server.client.generate(request))
        server.calls.add(call)
        server.answers += request.n
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

    async def load_version(self, version: PolicyVersion) -> None:
        """Give all servers other weights, at the same time; those that fail are taken out."""
        async with self._updating:
            self._target = version
            stale = [server for server in self._servers.values() if server.loaded != version]
            await self._each(stale, lambda server: self._update(server, version))
        if stale:
            self._on_change()

    async def abort_all(self) -> None:
        """End all requests with the tokens that they have."""
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

    async def _least_loaded(self) -> _Server:
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._servers:
                    await self._joined.wait()
        except TimeoutError:
            raise GenerationError(f"no generation server joined in {self._patience_s:g} s") from None
        return min(self._servers.values(), key=lambda server: server.answers)

    async def _bring_up(self, server: _Server) -> None:
        target = self._target
        if target is None:
            await server.client.health()
        elif target.version == 0 and await server.client.loaded_version() == 0:
            server.loaded = target
        else:
            await self._update(server, target)

    async def _update(self, server: _Server, version: PolicyVersion) -> None:
        await server.client.load_version(version, interrupt=self._interrupt)
        server.loaded = version

    async def _each(self, servers: Iterable[_Server], call: Callable[[_Server], Awaitable[T]]) -> list[T]:
        """Ask servers at the same time; the answers of those that gave one, while the others are taken out."""
        servers = list(servers)
        results = await asyncio.gather(*map(call, servers), return_exceptions=True)
        answers: list[T] = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, ServerLostError):
                await self._remove(server, str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result)
        return answers

    async def _remove(self, server: _Server, reason: str, *, failed: bool = True) -> None:
        """Take a server out once, however many of its requests notice that it is gone."""
        if server.lost:
            return
        server.lost = True
        if self._servers.get(server.name) is server:
            del self._servers[server.name]
            if failed:
                self._lost[server.name] = server.client.url
        if not self._servers:
            self._joined.clear()
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
