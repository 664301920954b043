"""How this package's HTTP servers listen, and how long their clients may be silent. Every server is started from here.

aiohttp has one time limit, `keepalive_timeout`, an hour by default. It bounds the time in which the headers of the next
request must have come, however slowly they come. Nothing bounds a body.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from areal_core.errors import ConfigError
from areal_core.storage.rundir import write_json

_LEAST_BYTES = 1024  # of a body, in that time
_FIRST_PORT, _TRIES = 10_000, 100  # of a listener that keeps its port
_RELEASE_S, _AGAIN_S = 5.0, 0.2  # for the port of a process that has just been killed


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


async def listen(runner: web.AppRunner, address: str, port: int = 0, *, kept: Path | None = None) -> str:
    """Listen on `address` and return the URL. With `port` 0 the kernel chooses a free port.

    With the file `kept`, a listener has the same port whenever it is started again: the file's, else a free one, which
    is written there. Raises ConfigError where the kept port is taken, and OSError.
    """
    if kept is None or port:
        await web.TCPSite(runner, address, port).start()
    elif kept.exists():
        await _listen_again(runner, address, int(kept.read_text()), kept)
    else:
        await _listen_on_first(runner, address)
        write_json(kept, runner.addresses[0][1])
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _listen_again(runner: web.AppRunner, address: str, port: int, kept: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _RELEASE_S
    while True:
        try:
            await web.TCPSite(runner, address, port).start()
            return
        except OSError as error:
            if loop.time() > deadline:
                why = os.strerror(error.errno or 0)
                raise ConfigError(
                    f"{kept}: this machine can't listen on port {port} of {address} again: {why}; end what uses the "
                    "port, or delete the file to have another one chosen"
                ) from None
        await asyncio.sleep(_AGAIN_S)


async def _listen_on_first(runner: web.AppRunner, address: str) -> None:
    """Listen on a free port that the kernel gives to no connection, which could take one while its listener is started
    again; on any port, should none be found."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for left in reversed(range(_TRIES)):
        port = random.SystemRandom().randrange(_FIRST_PORT, low) if left and low > _FIRST_PORT else 0
        try:
            await web.TCPSite(runner, address, port).start()
            return
        except OSError:  # it is taken
            if not left:
                raise


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
