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
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from areal_core.controller.registry import Server, ServerRegistry, Update
from areal_core.errors import GenerationError
from areal_core.types import PolicyVersion


class Transfer:
    """The transfers into the servers of one registry, one at a time."""

    def __init__(self, registry: ServerRegistry, interruption: str, patience_s: float) -> None:
        self._registry = registry
        self._interruption = interruption
        self._patience_s = patience_s
        self._group: tuple[Server, ...] = ()  # those that met the trainer, in the order of their ranks
        self._update: Update | None = None  # the one that a trainer began last

    async def group(self, version: PolicyVersion) -> dict[str, Any]:
        """What the trainer has to know before it sends a version: whether any server lacks it, whether all of them have
        met the trainer, and how many processes that would be."""
        servers = self._registry.at_work
        sizes = await self._registry.ask(servers, lambda server: server.client.world_size())
        return {
            "needed": any(server.loaded != version for server in servers),
            "open": servers == self._group,
            "world_size": sum(sizes.values()),
        }

    async def open(self, init_info: dict[str, Any]) -> None:
        """Have every server meet the trainer, which waits for them meanwhile. Ranks follow one another."""
        self.abandon("another trainer has come")
        ask = self._registry.ask
        async with self._registry.exclusive:
            servers = self._registry.at_work
            met = tuple(server for server in servers if server in self._group)
            self._group = ()
            await ask(met, lambda server: server.client.close_transfer())
            infos = dict.fromkeys(servers, init_info)
            if "rank_offset" in init_info:
                offset = int(init_info["rank_offset"])
                sizes = await ask(servers, lambda server: server.client.world_size())
                for server, size in sizes.items():
                    infos[server] = init_info | {"rank_offset": offset}
                    offset += size
            await ask(servers, lambda server: server.client.open_transfer(infos[server]))
            self._group = servers

    async def begin(self, version: PolicyVersion) -> None:
        """Have generation stand still everywhere. A transfer that was never ended is given up first. Raises
        GenerationError, before anything stands still, when servers have come or gone since they met the trainer."""
        self.abandon("the trainer began again")
        update = self._update = Update(self._registry, version, self._patience_s, members=self._group)
        await update.begin()
        await self._phase(update, lambda server: server.client.begin_transfer(version, self._interruption))

    async def receive(self, update_info: Any) -> None:
        """Have the servers take what the trainer is sending. Returns when all have. Raises GenerationError when one was
        lost: the trainer may be waiting for it."""
        update = self._under_way()
        before = update.members
        await self._phase(update, lambda server: server.client.receive(update_info))
        if update.members != before:
            raise GenerationError("a server was lost while it received weights: the group is broken")

    async def end(self) -> None:
        """Have generation go on with what has come."""
        update = self._under_way()
        await self._phase(update, lambda server: server.client.end_transfer(update.version, self._interruption))
        update.end()

    async def wait(self, version: PolicyVersion) -> None:
        """Until every server has the version, or is taken out since it did not get it in time."""
        registry = self._registry

        def lacking() -> list[Server]:
            return [server for server in registry.at_work if server.loaded != version]

        try:
            async with asyncio.timeout(self._patience_s):
                await registry.until(lambda: not lacking())
        except TimeoutError:
            for server in lacking():
                registry.apply(server, "fail", f"version {version.version} did not come in {self._patience_s:g} s")

    def abandon(self, reason: str) -> None:
        """Give up what a trainer has begun, if anything."""
        if self._update is not None:
            self._update.abandon(reason)

    def _under_way(self) -> Update:
        if self._update is None or self._update.over:
            raise GenerationError("no transfer of weights is under way: it was given up, or never began")
        return self._update

    async def _phase(self, update: Update, call: Callable[[Server], Awaitable[None]]) -> None:
        if not await update.phase(call):
            raise GenerationError(f"the transfer of version {update.version.version} was given up meanwhile")


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
