"""One server of each kind for all tests here: vLLM's takes half a minute to start."""

import contextlib
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


KINDS = ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]


@contextlib.contextmanager
def guarded(kind, base, folder, *options):
    """A server of this kind, which takes the run's token."""
    token = folder / "token"
    token.write_text(f"{TOKEN}\n")
    ready = folder / f"{kind}.json"
    with serving(kind, base, ready, "--slots", SLOTS, "--token-file", token, *options) as server:
        yield replace(server, token=TOKEN)


@pytest.fixture(scope="package", params=KINDS)
def server(request, published, tmp_path_factory):
    with guarded(request.param, published.base, tmp_path_factory.mktemp("ready")) as server:
        yield server


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
    async with contextlib.AsyncExitStack() as pools:

        async def make(interruption):
            pool = GenerationPool(completions_per_server=4 * SLOTS, interruption=interruption, token=TOKEN)
            pools.push_async_callback(pool.close)
            await pool.join("server", server.url, lambda: published.versions[0])
            return pool

        yield make


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession(server.url, headers=authorization(TOKEN)) as session:
        yield session
