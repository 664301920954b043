"""One server of each kind for all tests here: vLLM's takes half a minute to start."""

from dataclasses import replace

import aiohttp
import pytest
import torch

from areal_core.api.access import authorization
from areal_core.controller.pool import GenerationPool
from areal_core.generation.client import GenerationClient
from tests.support.live_servers import SEEDS, SLOTS, SPEC, publish, serving

TOKEN = "a-token-of-this-run"


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    torch.set_num_threads(1)  # for transformers: the servers have the other cores
    return publish(tmp_path_factory.mktemp("generation"), SPEC, SEEDS)


@pytest.fixture(scope="package", params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request, published, tmp_path_factory):
    ready = tmp_path_factory.mktemp("ready") / f"{request.param}.json"
    token = ready.with_name("token")
    token.write_text(f"{TOKEN}\n")
    with serving(request.param, published.base, ready, "--slots", SLOTS, "--token-file", token) as server:
        yield replace(server, token=TOKEN)


@pytest.fixture
async def client(server, published):
    """A client of a server that runs the base weights and nothing else."""
    client = GenerationClient(server.url, token=TOKEN)
    await client.identify()
    yield client
    await client.abort_all()
    if await client.loaded_version() != 0:
        await client.load_version(published.versions[0], "resubmit")
    await client.close()


@pytest.fixture
async def pool_of(client, server, published):
    """Makes pools of that one server."""
    pools = []

    async def make(interruption):
        pool = GenerationPool(completions_per_server=4 * SLOTS, interruption=interruption, token=TOKEN)
        pools.append(pool)
        await pool.join("server", server.url, lambda: published.versions[0])
        return pool

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession(server.url, headers=authorization(TOKEN)) as session:
        yield session
