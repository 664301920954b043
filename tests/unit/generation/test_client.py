"""The pool of servers, against servers that do as they are told."""

import asyncio
import dataclasses
import subprocess
import sys

import pytest
from aiohttp import web

from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient, GenerationPool
from areal_core.types import PolicyVersion
from areal_core.wire import ServerLoad
from tests.support.generation import request


def version(number):
    return PolicyVersion(version=number, path=f"/weights/{number}", sha256=f"hash-{number}")


class FakeServer:
    """Keeps answers back until `release` is set, and fails the path in `broken` with the status there."""

    def __init__(self):
        self.calls = []
        self.broken = {}
        self.release = asyncio.Event()
        self.release.set()
        self.label = "0"
        self.aborted = 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _handle(self, http):
        if http.path in self.broken:
            return web.Response(status=self.broken[http.path], text="as it was told")
        if http.path == "/inference/v1/generate":
            self.calls.append((await http.json())["request_id"])
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
            return web.Response(body=b"answer")
        if http.path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        value = await http.json() if http.can_read_body else None
        self.calls.append((http.path_qs, value))
        if http.path == "/finish_weight_update":
            self.label = value["weight_version"]
        if http.path == "/load":
            return web.json_response({field.name: 1 for field in dataclasses.fields(ServerLoad)})
        return web.json_response({})


@pytest.fixture
async def servers():
    async with FakeServer() as first, FakeServer() as second:
        yield first, second


@pytest.fixture
async def pool():
    pool = GenerationPool(answers_per_server=10, patience_s=5)
    yield pool
    await pool.close()


async def started(server, *request_ids):
    async with asyncio.timeout(5):
        while not set(request_ids) <= {call for call in server.calls if isinstance(call, str)}:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("interrupt", "mode"), [(True, "keep"), (False, "wait")])
async def test_an_update_goes_through_its_phases_in_order(servers, interrupt, mode):
    client = GenerationClient(servers[0].url)
    await client.load_version(version(7), interrupt=interrupt)
    await client.close()
    assert servers[0].calls == [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": "/weights/7", "sha256": "hash-7"}}),
        (f"/pause?mode={mode}&clear_cache=true", None),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/resume", None),
    ]


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/pause", "/finish_weight_update", "/resume"]
)
@pytest.mark.parametrize("status", [400, 500])
async def test_a_server_that_fails_a_phase_is_lost_and_the_others_go_on(servers, pool, path, status):
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: version(0))
    servers[0].broken[path] = status
    await pool.load_version(version(1))
    assert (pool.version, pool.capacity) == (1, 10)
    servers[1].release.clear()
    call = asyncio.ensure_future(pool.generate(request()))
    await started(servers[1], "r")
    servers[1].release.set()
    assert await call == b"answer"


async def test_refusals_are_errors_and_server_errors_and_lost_connections_are_lost_servers(servers):
    client = GenerationClient(servers[0].url)
    for status, kind in (
        (400, GenerationError),
        (404, GenerationError),
        (500, ServerLostError),
        (503, ServerLostError),
    ):
        servers[0].broken["/inference/v1/generate"] = status
        with pytest.raises(GenerationError, match=rf"{status}: as it was told") as raised:
            await client.generate(request())
        assert raised.type is kind
    await servers[0].__aexit__()
    with pytest.raises(ServerLostError):
        await client.generate(request())
    await client.close()
    with pytest.raises(ServerLostError, match="closed"):
        await client.health()


async def test_requests_go_to_the_server_with_the_fewest_answers(servers, pool):
    for name, server in zip("ab", servers, strict=True):
        server.release.clear()
        await pool.join(name, server.url, lambda: version(0))
    calls = [asyncio.ensure_future(pool.generate(request("big", n=5)))]
    await started(servers[0], "big")
    calls += [asyncio.ensure_future(pool.generate(request(f"small-{i}", n=2))) for i in range(3)]
    await started(servers[1], "small-0", "small-1", "small-2")
    calls.append(asyncio.ensure_future(pool.generate(request("last", n=1))))
    await started(servers[0], "last")
    for server in servers:
        server.release.set()
    assert await asyncio.gather(*calls) == [b"answer"] * 5


async def test_a_refused_request_does_not_cost_the_server_its_place(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(0))
    servers[0].broken["/inference/v1/generate"] = 400
    with pytest.raises(GenerationError):
        await pool.generate(request())
    assert pool.capacity == 10


async def test_requests_wait_for_a_server_and_give_up(servers):
    pool = GenerationPool(answers_per_server=10, patience_s=0.05)
    with pytest.raises(GenerationError, match="no generation server joined"):
        await pool.generate(request())
    pool = GenerationPool(answers_per_server=10, patience_s=5)
    call = asyncio.ensure_future(pool.generate(request()))
    await asyncio.sleep(0)
    await pool.join("a", servers[0].url, lambda: None)
    assert await call == b"answer"
    await pool.close()


async def test_requests_of_a_server_that_leaves_fail_and_cancelled_ones_are_cancelled(servers, pool):
    servers[0].release.clear()
    await pool.join("a", servers[0].url, lambda: version(0))
    calls = [asyncio.ensure_future(pool.generate(request(name))) for name in ("cancelled", "failed")]
    await started(servers[0], "cancelled", "failed")
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    assert pool.capacity == 10
    await pool.leave("a")
    with pytest.raises(ServerLostError, match="failed"):
        await calls[1]
    async with asyncio.timeout(5):
        while servers[0].aborted < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert pool.capacity == 0


async def test_a_server_that_joins_gets_the_newest_version_first(servers, pool):
    await pool.join("a", servers[0].url, lambda: version(3))
    assert servers[0].label == "3"
    await pool.load_version(version(4))
    await pool.join("b", servers[1].url, lambda: version(4))
    assert (servers[1].label, pool.version) == ("4", 4)
    updates = len(servers[1].calls)
    await pool.load_version(version(4))
    assert len(servers[1].calls) == updates


async def test_version_0_is_sent_only_to_servers_that_have_another(servers, pool):
    servers[1].label = "5"
    await pool.join("a", servers[0].url, lambda: version(0))
    await pool.join("b", servers[1].url, lambda: version(0))
    assert servers[0].calls == []
    assert servers[1].label == "0"


async def test_a_server_that_fails_to_join_takes_no_work(servers, pool):
    servers[0].broken["/update_weights"] = 400
    with pytest.raises(ServerLostError):
        await pool.join("a", servers[0].url, lambda: version(1))
    assert (pool.capacity, pool.version) == (0, 1)


async def test_the_version_is_the_lowest_that_a_server_has(servers, pool):
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: version(1))
    loading = asyncio.ensure_future(pool.load_version(version(2)))
    while not loading.done():
        have = sorted((servers[0].label, servers[1].label))
        assert pool.version <= int(have[0])
        await asyncio.sleep(0)
    assert pool.version == 2


async def test_loads_and_aborts_reach_every_server_and_lose_those_that_fail(servers, pool):
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: version(0))
    assert [load.generated_tokens for load in await pool.loads()] == [1, 1]
    await pool.abort_all()
    assert servers[1].calls[-2:] == [("/pause?mode=abort&clear_cache=false", None), ("/resume", None)]
    servers[0].broken["/load"] = 500
    assert len(await pool.loads()) == 1
    assert pool.capacity == 10


async def test_what_failed_is_lost_until_it_joins_again(servers, pool):
    for name, server in zip("ab", servers, strict=True):
        await pool.join(name, server.url, lambda: version(0))
    servers[0].broken["/health"] = 503
    await pool.check()
    assert pool.lost == (servers[0].url,)
    assert pool.capacity == 10
    servers[0].broken["/weight_info"] = 500
    with pytest.raises(ServerLostError):
        await pool.join("a", servers[0].url, lambda: version(0))
    assert pool.lost == (servers[0].url,)
    servers[0].broken.clear()
    await pool.join("a", servers[0].url, lambda: version(0))
    await pool.leave("b")
    assert pool.lost == ()


def test_the_client_imports_without_torch():
    code = "import areal_core.generation.client, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
