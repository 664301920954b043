"""The controller's routes by which reward workers of other machines work."""

from __future__ import annotations

from aiohttp import web

from areal_core.rewards.pool import RewardPool


def reward_routes(rewards: RewardPool) -> list[web.RouteDef]:
    """Routes by which workers bring answers and wait for work, and leave."""

    async def work(request: web.Request) -> web.Response:
        def is_gone() -> bool:
            return request.transport is None or request.transport.is_closing()

        place, incarnation = int(request.match_info["place"]), request.query["incarnation"]
        answered, timeout_s = int(request.query["answered"]), float(request.query.get("timeout_s", "5"))
        message = await rewards.exchange(place, incarnation, answered, await request.read(), timeout_s, is_gone)
        return web.Response(status=204) if message is None else web.Response(body=message)

    async def leave(request: web.Request) -> web.Response:
        rewards.leave(request.query["host"])
        return web.json_response({})

    return [web.post("/rewards/{place}", work), web.delete("/rewards", leave)]
