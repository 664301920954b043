"""The door of an aiohttp application: nobody passes without the run's token, whatever is asked for."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from areal_core.api.access import REFUSED, admits


def guard(token: str) -> Middleware:
    """A middleware that refuses, with 401, all requests without this token."""

    @web.middleware
    async def door(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not admits(token, request.headers.get("Authorization")):
            raise web.HTTPUnauthorized(reason=REFUSED, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return door
