"""Weights that the trainer sends to the servers itself, over NCCL or CUDA IPC: the controller's part in it.

vLLM's trainer-side engine knows how to send; whom it asks to pause, receive and resume is this, for all servers at
once. One transfer:

    open      when the servers have changed: /init_weight_transfer_engine at each, while the trainer waits for them
    begin     pause, /start_weight_update
    receive   /update_weights, while the trainer sends
    end       /finish_weight_update, resume

It has a deadline. A server that fails a phase is taken out, and joins again as any other; a trainer that stays away, or
comes back and begins anew, leaves servers with half of the weights, which are taken out as well. NCCL has no way to go
on without a member: whoever sends to a group that has changed must open a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from areal_core.controller.servers import Server, ask_each
from areal_core.errors import GenerationError
from areal_core.types import PolicyVersion

T = TypeVar("T")


class Transfer:
    """The transfers of one pool. `servers` is the pool's own mapping; `remove(server, reason)` takes one out."""

    def __init__(
        self,
        servers: Mapping[str, Server],
        updating: asyncio.Lock,
        interruption: str,
        remove: Callable[[Server, str], Awaitable[None]],
        patience_s: float,
    ) -> None:
        self._servers = servers
        self._updating = updating
        self._interruption = interruption
        self._remove = remove
        self._patience_s = patience_s
        self._group: tuple[Server, ...] = ()  # those that met the trainer, in the order of their ranks
        self._members: tuple[Server, ...] = ()  # of these, the ones that take part in what is under way
        self._version: PolicyVersion | None = None  # that is under way
        self._turns = 0  # how often a trainer has begun
        self._deadline: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    async def group(self, version: PolicyVersion) -> dict[str, Any]:
        """What the trainer has to know before it sends a version: whether any server lacks it, whether all of them have
        met the trainer, and how many processes that would be."""
        servers = tuple(self._servers.values())
        sizes = await self._each(servers, lambda server: server.client.world_size())
        return {
            "needed": any(server.loaded != version for server in servers),
            "open": servers == self._group,
            "world_size": sum(sizes.values()),
        }

    async def open(self, init_info: dict[str, Any]) -> None:
        """Have every server meet the trainer, which waits for them meanwhile. Ranks follow one another."""
        await self._abandon("another trainer has come")
        async with self._updating:
            servers = tuple(self._servers.values())
            met = tuple(server for server in servers if server in self._group)
            self._group = ()
            await self._each(met, lambda server: server.client.close_transfer())
            infos = dict.fromkeys(servers, init_info)
            if "rank_offset" in init_info:
                offset = int(init_info["rank_offset"])
                sizes = await self._each(servers, lambda server: server.client.world_size())
                for server, size in sizes.items():
                    infos[server] = init_info | {"rank_offset": offset}
                    offset += size
            await self._each(servers, lambda server: server.client.open_transfer(infos[server]))
            self._group = servers

    async def begin(self, version: PolicyVersion) -> None:
        """Have generation stand still everywhere. A transfer that was never ended is given up first. Raises
        GenerationError, before anything stands still, when servers have come or gone since they met the trainer."""
        self._turns += 1
        turn = self._turns
        await self._abandon("the trainer began again")
        await self._updating.acquire()
        if turn != self._turns or tuple(self._servers.values()) != self._group:
            self._updating.release()
            raise GenerationError("the servers are not those that met the trainer: it has to open a new group")
        self._version, self._members = version, self._group
        self._deadline = asyncio.get_running_loop().call_later(self._patience_s, self._late)
        await self._phase(lambda server: server.client.begin_transfer(version, self._interruption))

    async def receive(self, update_info: Any) -> None:
        """Have the servers take what the trainer is sending. Returns when all have. Raises GenerationError when one was
        lost: the trainer may be waiting for it."""
        before = self._members
        await self._phase(lambda server: server.client.receive(update_info))
        if self._members != before:
            raise GenerationError("a server was lost while it received weights: the group is broken")

    async def end(self) -> None:
        """Have generation go on with what has come."""
        version = self._under_way()
        await self._phase(lambda server: server.client.end_transfer(version, self._interruption))
        for server in self._members:
            server.loaded = version
        self._close()

    async def wait(self, version: PolicyVersion) -> None:
        """Until every server has the version, or is taken out since it did not get it in time."""
        try:
            async with asyncio.timeout(self._patience_s):
                while any(server.loaded != version for server in self._servers.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for server in list(self._servers.values()):
                if server.loaded != version:
                    await self._remove(server, f"version {version.version} did not come in {self._patience_s:g} s")

    def servers_changed(self) -> None:
        """A server came or went."""
        self._changed.set()

    def _under_way(self) -> PolicyVersion:
        if self._version is None:
            raise GenerationError("no transfer of weights is under way: it was given up, or never began")
        return self._version

    async def _phase(self, call: Callable[[Server], Awaitable[None]]) -> None:
        version, members = self._under_way(), self._members
        answered = await self._each(members, call)
        if self._version is not version:
            raise GenerationError(f"the transfer of version {version.version} was given up meanwhile")
        self._members = tuple(answered)

    async def _each(self, servers: tuple[Server, ...], call: Callable[[Server], Awaitable[T]]) -> dict[Server, T]:
        return await ask_each(servers, call, self._remove)

    def _late(self) -> None:
        reason = f"a transfer of weights was not ended in {self._patience_s:g} s"
        self._giving_up = asyncio.ensure_future(self._abandon(reason))

    async def _abandon(self, reason: str) -> None:
        if self._version is None:
            return
        members, self._members = self._members, ()
        self._close()
        for server in members:
            await self._remove(server, reason)

    def _close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._version = self._deadline = None
        self._updating.release()
        self._changed.set()


def transfer_routes(transfer: Transfer, newest: Callable[[], PolicyVersion]) -> list[web.RouteDef]:
    """The controller as one vLLM server, as vLLM's trainer-side engine sees it. What is sent is the `newest` version:
    the trainer announces it before it sends it, and an older one that it makes once more is needed nowhere."""

    async def group(request: web.Request) -> web.Response:
        version = newest()
        found = await transfer.group(version)
        return web.json_response(
            found | {"needed": found["needed"] and version.version == int(request.query["version"])}
        )

    async def open_(request: web.Request) -> web.Response:
        await transfer.open((await request.json())["init_info"])
        return web.json_response({})

    async def begin(_: web.Request) -> web.Response:
        await transfer.begin(newest())
        return web.json_response({})

    async def receive(request: web.Request) -> web.Response:
        await transfer.receive((await request.json())["update_info"])
        return web.json_response({})

    async def end(_: web.Request) -> web.Response:
        await transfer.end()
        return web.json_response({})

    return [
        web.get("/transfer", group),
        web.post("/transfer/init_weight_transfer_engine", open_),
        web.post("/transfer/start_weight_update", begin),
        web.post("/transfer/update_weights", receive),
        web.post("/transfer/finish_weight_update", end),
    ]
