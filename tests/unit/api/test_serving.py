"""Ports that listeners keep, and connections of clients that begin a request and do not end it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from areal_core.api import serving as module
from areal_core.api.access import admits, authorization
from areal_core.api.patience import lag_tolerant_timeout
from areal_core.api.serving import listen, runner
from areal_core.errors import ConfigError
from tests.support.virtual import run_virtual

SILENT_S = 0.5
PATIENCE_S = 60.0  # of a test; nothing takes so long
CORE = Path(__file__).parents[3] / "areal_core"


@contextlib.asynccontextmanager
async def serving(silent_s: float) -> AsyncIterator[int]:
    """The port of a server that sends every body back."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application(client_max_size=2**20)
    app.add_routes([web.post("/", echo)])
    made = runner(app, silent_s=silent_s, lingering_time=0.0)
    await made.setup()
    await web.TCPSite(made, "127.0.0.1", 0).start()
    yield made.addresses[0][1]
    await made.cleanup()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(SILENT_S) as port:
        yield port


async def answer(port: int, *parts: bytes, every_s: float = 0.0) -> bytes:
    """All that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(every_s)
            return await reader.read()
    finally:
        writer.close()


def head(length: int, more: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (more, length)


@pytest.mark.parametrize("sent", [b"", b"POST / HT", head(5)[:-2]], ids=["nothing", "line", "headers"])
async def test_half_a_header_closes_the_connection(port: int, sent: bytes) -> None:
    assert await answer(port, sent) == b""


async def test_connection_that_stands_still_is_closed(port: int) -> None:
    """In the body of a request, and in the header of one that follows."""
    found = await answer(port, head(5) + b"ha")
    assert found.startswith(b"HTTP/1.1 408 ")
    assert found.endswith(b"body: received less than 1024 bytes in 0.5 s")
    found = await answer(port, head(5) + b"whole", head(5)[:30])
    assert found.endswith(b"\r\n\r\nwhole")
    assert found.count(b"HTTP/1.1") == 1


async def test_slow_upload_that_goes_on_is_received() -> None:
    """It takes longer than a client may be silent."""
    pieces = [bytes([65 + number]) * 4096 for number in range(15)]
    async with serving(2.0) as port:
        found = await answer(port, head(15 * 4096, b"Connection: close\r\n"), *pieces, every_s=0.2)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.endswith(b"".join(pieces))


def test_every_server_is_started_so() -> None:
    assert [file.name for file in CORE.rglob("*.py") if "AppRunner(" in file.read_text()] == ["serving.py"]


async def listening(port_file: Path) -> tuple[web.AppRunner, str]:
    made = runner(web.Application())
    await made.setup()
    return made, await listen(made, "127.0.0.1", port_file=port_file)


async def test_listener_keeps_its_port_where_no_connection_takes_it(tmp_path: Path) -> None:
    first, url = await listening(tmp_path / "port")
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not low <= int(url.rpartition(":")[2]) <= high
    await first.cleanup()
    again, there = await listening(tmp_path / "port")
    assert there == url
    other, elsewhere = await listening(tmp_path / "other")
    assert elsewhere != url
    for one in (again, other):
        await one.cleanup()


async def test_kept_port_that_is_taken_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RELEASE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "port").write_text(f"{port}\n")
        line = (
            f"port: can't listen on port {port} of 127.0.0.1 again: Address already in use; stop the process that uses"
        )
        with pytest.raises(ConfigError, match=line):
            await listening(tmp_path / "port")


async def test_ports_that_are_taken_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], 0]
        monkeypatch.setattr(module.random.SystemRandom, "randrange", lambda *_: ports.pop(0))
        made, url = await listening(tmp_path / "port")
        assert url != f"http://127.0.0.1:{taken.getsockname()[1]}"
        await made.cleanup()


def test_run_admits_its_own_header_alone() -> None:
    assert authorization(None) == {}
    assert admits("token", authorization("token")["Authorization"])
    for header in (None, "", "token", "Bearer", "Bearer ", "Bearer toke", "bearer token", "Bearer tokén"):
        assert not admits("token", header)
        assert not admits("", header)  # an empty token admits nobody


async def waited(seconds: float | None) -> float:
    """Until `lag_tolerant_timeout` gives up, in time of the loop."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(TimeoutError):
        async with lag_tolerant_timeout(seconds):
            await asyncio.sleep(1000.0)
    return loop.time() - start


def test_a_loop_that_always_runs_waits_as_long_as_it_says() -> None:
    assert run_virtual(waited(10.0)) == pytest.approx(10.0)


def test_wait_without_a_limit_goes_on_and_a_cancelled_one_is_cancelled() -> None:
    async def main() -> None:
        async with lag_tolerant_timeout(None):
            await asyncio.sleep(1e6)
        task = asyncio.create_task(waited(10.0))
        await asyncio.sleep(3.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtual(main())


@pytest.mark.parametrize("before_s", [0.0, 0.15])
async def test_what_came_while_the_loop_was_blocked_is_read(before_s: float) -> None:
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.setblocking(False)
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        async with lag_tolerant_timeout(0.2):
            receiving = asyncio.ensure_future(loop.sock_recv(ours, 1))
            await asyncio.sleep(before_s)
            theirs.send(b"x")
            time.sleep(0.4)  # noqa: ASYNC251 - the loop stands still
            assert await receiving == b"x"
