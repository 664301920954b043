"""How long clients of this package's HTTP servers may be silent. Every server is started with a `runner` from here.

aiohttp has one time limit, `keepalive_timeout`, an hour by default. It bounds the time in which the headers of the next
request must have come, however slowly they come. Nothing bounds a body.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

_LEAST_BYTES = 1024  # of a body, in that time


def runner(app: web.Application, *, silent_s: float = 60.0, **options: Any) -> web.AppRunner:
    """The runner of an application, with aiohttp's `options`. Connections close `silent_s` after the last response, or
    after their start, unless a request's headers have come; bodies that stand still for so long are refused (408)."""

    @web.middleware
    async def received(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.content.is_eof():
            await _read(request, silent_s)
        return await handler(request)

    app.middlewares.append(received)  # the last one: behind the door
    return web.AppRunner(app, access_log=None, keepalive_timeout=silent_s, **options)


async def _read(request: web.Request, silent_s: float) -> None:
    """Read the body, which `request` keeps."""
    reading = asyncio.ensure_future(request.read())
    try:
        while not reading.done():
            before = request.content.total_bytes
            await asyncio.wait([reading], timeout=silent_s)
            if not reading.done() and request.content.total_bytes - before < _LEAST_BYTES:
                raise web.HTTPRequestTimeout(text=f"body: less than {_LEAST_BYTES} bytes came in {silent_s:g} s")
        reading.result()
    finally:
        reading.cancel()
