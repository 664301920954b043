"""Start the HTTP servers of this package, with limits on the silence of their clients.

aiohttp's only time limit is `keepalive_timeout`, an hour by default. It bounds the time until the next request's
headers are complete. It does not bound bodies.
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

_LEAST_BYTES = 1024  # the least growth of a body within `silent_s`
_FIRST_PORT, _TRIES = 10_000, 100  # range and attempts for a listener that keeps its port
_RELEASE_S, _RETRY_S = 5.0, 0.2  # wait for the port of a process that was just killed


def runner(app: web.Application, *, silent_s: float = 60.0, **options: Any) -> web.AppRunner:
    """Create the runner of an application, with aiohttp's `options`.
    A connection closes `silent_s` seconds after its start or its last response, unless new headers have come. A body
    that stalls for as long is refused (408)."""

    @web.middleware
    async def received(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.content.is_eof():
            await _read(request, silent_s)
        return await handler(request)

    app.middlewares.append(received)  # last, so that the token check runs first
    return web.AppRunner(app, access_log=None, keepalive_timeout=silent_s, **options)


async def listen(runner: web.AppRunner, address: str, port: int = 0, *, port_file: Path | None = None) -> str:
    """Listen on `address` and return the URL. With `port` 0 the kernel chooses a free port.

    With the file `port_file`, the listener keeps its port across restarts. The first start chooses a free port and
    writes it there. Raises ConfigError if the kept port is taken, and OSError.
    """
    if port_file is None or port:
        await web.TCPSite(runner, address, port).start()
    elif port_file.exists():
        await _listen_again(runner, address, int(port_file.read_text()), port_file)
    else:
        await _listen_on_first(runner, address)
        write_json(port_file, runner.addresses[0][1])
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _listen_again(runner: web.AppRunner, address: str, port: int, port_file: Path) -> None:
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
                    f"{port_file}: can't listen on port {port} of {address} again: {why}; stop the process that uses "
                    "this port, or delete the file to choose another port"
                ) from None
        await asyncio.sleep(_RETRY_S)


async def _listen_on_first(runner: web.AppRunner, address: str) -> None:
    """Listen on a free port below the kernel's ephemeral range; on any port if none is found.
    No outgoing connection can then take the port while its listener restarts."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for left in reversed(range(_TRIES)):
        port = random.SystemRandom().randrange(_FIRST_PORT, low) if left and low > _FIRST_PORT else 0
        try:
            await web.TCPSite(runner, address, port).start()
            return
        except OSError:  # the port is taken
            if not left:
                raise


async def _read(request: web.Request, silent_s: float) -> None:
    """Read the body into `request`. Raises a 408 if it stalls for `silent_s` seconds."""
    reading = asyncio.ensure_future(request.read())
    try:
        while not reading.done():
            before = request.content.total_bytes
            await asyncio.wait([reading], timeout=silent_s)
            if not reading.done() and request.content.total_bytes - before < _LEAST_BYTES:
                raise web.HTTPRequestTimeout(text=f"body: received less than {_LEAST_BYTES} bytes in {silent_s:g} s")
        reading.result()
    finally:
        reading.cancel()
