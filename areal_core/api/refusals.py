"""Shared parts of the aiohttp applications: body parsing, one-line errors, and the token check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from areal_core.api.access import REFUSED, admits


def error_middleware(statuses: Mapping[type[Exception], int]) -> Middleware:
    """Return a middleware that turns exceptions into responses of one line.
    The first matching kind in `statuses` sets the status; other errors of a request get 400."""

    @web.middleware
    async def report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (*statuses, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)
            name = f"{type(error).__name__}: " if isinstance(error, KeyError | TypeError | OSError) else ""
            return web.Response(status=status, text=" ".join(f"{name}{error}".split()))

    return report_errors


def token_middleware(token: str) -> Middleware:
    """Return a middleware that refuses requests without this token (401)."""

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not admits(token, request.headers.get("Authorization")):
            raise web.HTTPUnauthorized(reason=REFUSED, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check_token


T = TypeVar("T")


async def read(request: web.Request, kind: type[T]) -> T:
    """Parse the JSON body of a request as `kind`. Raises ValueError with the name of the bad field."""
    try:
        return msgspec.convert(await request.json(), kind)  # msgspec's own JSON parser rejects NaN
    except msgspec.ValidationError as error:
        raise ValueError(f"body: {error}") from None
    except RecursionError:
        raise ValueError("body: its JSON is nested too deeply") from None
