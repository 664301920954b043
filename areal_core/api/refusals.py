"""What an aiohttp application refuses: requests without the run's token, and errors, as one line of text."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from areal_core.api.access import REFUSED, admits


def refusals(statuses: Mapping[type[Exception], int]) -> Middleware:
    """A middleware: errors of these kinds have these statuses, the first that fits; what else is wrong with a request
    has 400."""

    @web.middleware
    async def as_lines(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (*statuses, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)
            name = f"{type(error).__name__}: " if isinstance(error, KeyError | TypeError | OSError) else ""
            return web.Response(status=status, text=" ".join(f"{name}{error}".split()))

    return as_lines


def guard(token: str) -> Middleware:
    """A middleware that refuses, with 401, all requests without this token."""

    @web.middleware
    async def door(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not admits(token, request.headers.get("Authorization")):
            raise web.HTTPUnauthorized(reason=REFUSED, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return door
