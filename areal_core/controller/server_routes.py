"""The controller's routes by which servers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from areal_core.controller import bodies
from areal_core.controller.pool import GenerationPool, Newest


def server_routes(
    servers: GenerationPool, newest: Newest, published: Callable[[], Awaitable[None]]
) -> list[web.RouteDef]:
    """Routes by which launchers, the evaluator and people list servers and have them join and leave; `newest` is the
    version for a new server, which waits until it is `published`."""

    async def join(request: web.Request) -> web.Response:
        server = await bodies.read(request, bodies.Join)
        try:
            async with asyncio.timeout(server.timeout_s):
                await published()
                await servers.join(server.name, server.url, newest, stager=server.stager)
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response({})

    async def leave(request: web.Request) -> web.Response:
        await servers.leave(request.match_info["name"])
        return web.json_response({})

    async def listed(_: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "name": one.name,
                    "url": one.url,
                    "stager": one.client.stager,
                    "state": one.state.value,
                    "completions": one.completions,
                }
                for one in servers.registry.servers
            ]
        )

    return [web.get("/servers", listed), web.post("/servers", join), web.delete("/servers/{name}", leave)]
