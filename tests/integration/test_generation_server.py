"""The embedded server's process, in what it alone does or promises; tests/conformance has what vLLM's does too."""

import asyncio
import dataclasses

import aiohttp
import numpy as np
import pytest

from areal_core.errors import ServerLostError
from areal_core.generation.client import GenerationClient
from tests.support.generation import LLAMA_GQA, request
from tests.support.live_servers import SEEDS, SLOTS, get, post, publish, serving, until

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
