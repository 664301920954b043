"""Transfer of weights from the trainer to the servers, over NCCL or CUDA IPC: the controller's part in it.

vLLM's trainer-side engine sends the weights; its requests to pause, receive and resume come here, and are passed on to
all servers at once. One transfer:

    open      when the servers have changed: /init_weight_transfer_engine at each, the rendezvous with the trainer
    begin     pause, /start_weight_update
    receive   /update_weights, while the trainer sends
    end       /finish_weight_update, resume

It has a deadline. A server that fails a phase is taken out, and joins again as any other; a trainer that stays away, or
comes back and begins anew, leaves servers with half of the weights, which are taken out as well. NCCL can't go on
without a member: when the servers have changed, the trainer must open a new group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from areal_core.controller import bodies
from areal_core.controller.registry import Server, ServerRegistry, Update
from areal_core.errors import GenerationError
from areal_core.types import PolicyVersion


class Transfer:
    """The transfers into the servers of one registry, one at a time."""

    def __init__(self, registry: ServerRegistry, interruption: str, patience_s: float) -> None:
        self._registry = registry
        self._interruption = interruption
        self._patience_s = patience_s
        self._group: tuple[Server, ...] = ()  # members of the trainer's group, in the order of their ranks
        self._update: Update | None = None  # the one that the trainer began last

    async def group(self, version: PolicyVersion | None) -> dict[str, Any]:
        """What the trainer has to know before it sends a version: whether any server lacks it, whether the group is
        open to all of them, and how many processes they have."""
        servers = self._registry.at_work
        sizes = await self._registry.ask(servers, lambda server: server.client.world_size())
        return {
            "needed": any(server.loaded != version for server in servers),
            "open": servers == self._group,
            "world_size": sum(sizes.values()),
        }

    async def open(self, init_info: dict[str, Any]) -> None:
        """Have every server join the trainer's group; the trainer waits at the rendezvous. Ranks are consecutive."""
        self.abandon("another trainer has come")
        ask = self._registry.ask
        async with self._registry.exclusive:
            servers = self._registry.at_work
            known = tuple(server for server in servers if server in self._group)
            self._group = ()
            await ask(known, lambda server: server.client.close_transfer())
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
        """Pause generation at every server. A transfer that was never ended is given up first. Raises GenerationError,
        before anything is paused, when servers have joined or left since the group was opened."""
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
        """Have the servers load what has come, and resume generation."""
        update = self._under_way()
        await self._phase(update, lambda server: server.client.end_transfer(update.version, self._interruption))
        update.end()

    async def wait(self, version: PolicyVersion) -> None:
        """Wait until every server has the version; those that do not get it in time are taken out."""
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


def transfer_routes(transfer: Transfer, newest: Callable[[], PolicyVersion | None]) -> list[web.RouteDef]:
    """The controller as one vLLM server, as vLLM's trainer-side engine sees it. What is sent is the `newest` version:
    the trainer publishes it before it sends it, and an older one that it makes once more is needed nowhere."""

    async def group(request: web.Request) -> web.Response:
        version = newest()
        found = await transfer.group(version)
        asked = version is not None and version.version == int(request.query["version"])
        return web.json_response(found | {"needed": asked and found["needed"]})

    async def open_(request: web.Request) -> web.Response:
        await transfer.open((await bodies.read(request, bodies.TransferInit)).init_info)
        return web.json_response({})

    async def begin(_: web.Request) -> web.Response:
        if (version := newest()) is None:
            raise GenerationError("an older version than the newest one is needed nowhere")
        await transfer.begin(version)
        return web.json_response({})

    async def receive(request: web.Request) -> web.Response:
        await transfer.receive((await bodies.read(request, bodies.TransferUpdate)).update_info)
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
