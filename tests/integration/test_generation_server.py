"""The embedded server's process, in what it alone does or promises; tests/conformance has what vLLM's does too."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import socket

import aiohttp
import numpy as np
import pytest

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import join_completions
from areal_core.controller.pool import GenerationPool
from areal_core.errors import GenerationError, ServerLostError
from areal_core.generation.client import GenerationClient
from areal_core.types import PolicyVersion
from tests.support.generation import LLAMA_GQA, request
from tests.support.live_servers import SEEDS, SLOTS, get, post, publish, serving, start, until, url_of

# vLLM has no attention for heads this small.
SPEC = dataclasses.replace(LLAMA_GQA, context=32768, eos_token_ids=(1,))
LONG = 30_000  # tokens: a completion that outlasts whatever a test does meanwhile


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("generation"), SPEC, SEEDS)


@pytest.fixture(scope="module")
def server(published, tmp_path_factory):
    ready = tmp_path_factory.mktemp("ready") / "r.json"
    with serving("embedded", published.base, ready, "--slots", SLOTS) as server:
        yield server


@pytest.fixture
async def client(server, published):
    """A client of a server that runs the base weights and nothing else."""
    client = GenerationClient(server.url)
    await client.identify()
    yield client
    await client.abort_all()
    await client.load_version(published.versions[0], "recompute")
    await client.close()


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession(server.url) as session:
        yield session


@pytest.mark.nightly
async def test_running_completions_keep_their_slots_through_updates(client, server, published):
    asked = [request(f"r{i}", range(2, 5 + i), n=4, max_tokens=1500, seed=i, stop_token_ids=()) for i in range(5)]
    with server.slowed():
        calls = [asyncio.ensure_future(client.complete(item)) for item in asked]
        for version in (1, 2):
            before = (await until(client, lambda load: load.running == SLOTS)).generated_tokens
            await until(client, lambda load: load.generated_tokens > before + 500)  # noqa: B023 - awaited here
            await client.load_version(published.versions[version], "recompute")
        load = await client.load()
    assert load.running == SLOTS
    assert load.recomputed_tokens > SLOTS * 20
    await until(client, lambda load: load.recompute_ms > 0)  # before the next step

    seen = set()
    for item, call in zip(asked, calls, strict=True):
        for completion in await call:
            seen.add(tuple(np.unique(completion.versions).tolist()))
            published.reference.check(item, completion)
    assert (0, 1, 2) in seen


async def test_an_update_that_waits_for_running_completions_does_not_wait_for_others(client, server, published):
    asked = request("r", n=20, max_tokens=150, stop_token_ids=())  # four completions start later
    with server.slowed():
        call = asyncio.ensure_future(client.complete(asked))
        await until(client, lambda load: load.running == SLOTS)
        await client.load_version(published.versions[1], "wait")
    completions = await call
    assert [np.unique(completion.versions).tolist() for completion in completions] == [[0]] * SLOTS + [[1]] * 4
    for completion in completions:
        published.reference.check(asked, completion)


async def test_an_id_is_served_once_at_a_time(client):
    first = asyncio.ensure_future(client.complete(request(max_tokens=LONG, stop_token_ids=())))
    await until(client, lambda load: load.running == 1)
    with pytest.raises(GenerationError, match="already being served"):
        await client.complete(request())
    assert not first.done()


async def test_the_other_routes(client, http):
    async with http.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    assert await get(http, "/version") == (200, {"version": "0.32.0+areal.11"})
    assert await post(http, "/reset_prefix_cache") == (200, {"success": True})
    assert await post(http, "/update_weight_version", {"new_version": "8"}) == (
        200,
        {"success": True, "new_version": "8"},
    )
    assert await get(http, "/weight_info") == (200, {"weight_version": "8"})
    [completion] = await client.complete(request())
    assert set(completion.versions.tolist()) == {8}
    await post(http, "/sleep?level=1&mode=keep")
    assert await get(http, "/is_sleeping") == (200, {"is_sleeping": True})
    assert await get(http, "/is_paused") == (200, {"is_paused": True})
    await post(http, "/wake_up")
    assert await get(http, "/is_sleeping") == (200, {"is_sleeping": False})
    load = await client.load()
    assert load.idle_s > 0
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert f"areal_generation_generated_tokens {load.generated_tokens}" in lines
    assert "areal_generation_weight_version 8" in lines


async def test_the_pool_loads_into_all_servers_and_takes_out_one_that_dies(published, tmp_path):
    changes = []
    options = ("--slots", 4, "--deterministic")
    with contextlib.ExitStack() as stack:
        dying = start("embedded", published.base, tmp_path / "a.json", *options)
        stack.callback(dying.communicate)
        stack.callback(dying.kill)
        other = stack.enter_context(serving("embedded", published.base, tmp_path / "b.json", "--slots", 4))
        pool = GenerationPool(completions_per_server=8, patience_s=60)
        pool.registry.subscribe(lambda server, before: changes.append(len(pool.registry.at_work)))
        base = PolicyVersion(version=0, path=str(published.base), digest="not looked at")
        await pool.join("a", url_of(dying, tmp_path / "a.json"), lambda: base)
        await pool.join("b", other.url, lambda: base)
        assert (pool.version, pool.room) == (0, 16)
        await pool.load_version(published.versions[1])
        assert pool.version == 1

        pending = [PendingCompletions(request(f"r{i}", n=2, max_tokens=LONG, stop_token_ids=())) for i in range(2)]
        calls = [asyncio.ensure_future(pool.generate(pending)) for pending in pending]
        async with asyncio.timeout(120):
            while [load.running for load in await pool.loads()] != [2, 2]:  # noqa: ASYNC110 - other processes' state
                await asyncio.sleep(0.01)
        os.kill(dying.pid, signal.SIGKILL)
        with pytest.raises(ServerLostError):
            await calls[0]
        assert (pool.version, len(pool.registry.at_work)) == (1, 1)
        await pool.load_version(published.versions[2])
        assert pool.version == 2
        await pool.abort_all()
        await calls[1]
        for completion in join_completions(pending[1].completions()):
            published.reference.check(pending[1].request, completion)
        await pool.close()
    assert [servers for servers, _ in itertools.groupby(changes)] == [0, 1, 2, 1, 0]


def test_a_model_that_does_not_load_is_one_line_and_status_2(tmp_path):
    process = start("embedded", tmp_path / "nowhere", tmp_path / "ready.json")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert str(tmp_path / "nowhere") in errors
    assert not (tmp_path / "ready.json").exists()


def test_a_port_in_use_is_one_line_that_names_it_and_status_2(published, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("embedded", published.base, tmp_path / "ready.json", "--port", str(port))
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert f"127.0.0.1:{port}" in errors


async def test_sigterm_fails_running_requests_and_ends_with_status_0(published, tmp_path):
    with serving("embedded", published.base, tmp_path / "ready.json") as server:
        client = GenerationClient(server.url)
        call = asyncio.ensure_future(client.complete(request(max_tokens=LONG, stop_token_ids=())))
        await until(client, lambda load: load.running == 1)
        server.process.terminate()
        with pytest.raises(ServerLostError):
            await call
        await client.close()
        await asyncio.to_thread(server.process.wait, 240)  # a second signal would meet Python on its way out
