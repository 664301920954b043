"""Generation servers as processes: what the embedded one alone does or promises, and how vLLM becomes ready, ends and
fails to start. tests/conformance has what both do."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal

import aiohttp
import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import join_completions
from areal_core.controller.pool import GenerationPool
from areal_core.generation.client import GenerationClient
from areal_core.tracking.timeline import TimelineWriter, read_timeline
from tests.support.generation import LLAMA_GQA, request
from tests.support.live_servers import (
    EXACT,
    QWEN2,
    SEEDS,
    SLOTS,
    Server,
    deviations,
    get,
    members,
    post,
    publish,
    serving,
    start,
    until,
    url_of,
)
from tests.support.processes import wait_for

# vLLM has no attention for heads this small.
SPEC = dataclasses.replace(LLAMA_GQA, context=32768, eos_token_ids=(1,))


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
    assert await get(http, "/version") == (200, {"version": "0.32.0+areal.13"})
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


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """Tied embeddings, and a base model that stores them twice all the same, as some do."""
    published = publish(tmp_path_factory.mktemp("qwen2"), QWEN2, {0: 11, 1: 12})
    file = published.base / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    return published


@contextlib.contextmanager
def vllm(model, ready):
    """A server that is ready; nothing of it is left after the block."""
    process = start("vllm", model, ready)
    try:
        yield Server(kind="vllm", url=url_of(process, ready, "vllm"), process=process, ready=ready)
    finally:
        process.kill()
        process.communicate()
        for pid in members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def gone(group):
    """Wait until no process of a group runs."""
    wait_for(lambda: not members(group), lambda: members(group))


@pytest.mark.vllm
async def test_a_qwen2_model_is_updated_and_a_wrapper_that_is_killed_takes_vllm_along(qwen2, tmp_path):
    """The wrapper is killed, so it can end nothing: the kernel tells vLLM, which ends what it has started."""
    with vllm(qwen2.base, tmp_path / "ready.json") as server:
        spans = TimelineWriter(tmp_path / "generation-0.jsonl")
        pool = GenerationPool(completions_per_server=8, timeline=lambda name: spans)
        await pool.join("server", server.url, lambda: qwen2.versions[0])
        before, after = (PendingCompletions(request(name, n=2, stop_token_ids=())) for name in ("before", "after"))
        await pool.generate(before)
        await pool.load_version(qwen2.versions[1])
        assert pool.registry.lost == ()
        await pool.generate(after)
        for version, pending in enumerate((before, after)):
            for completion in join_completions(pending.completions()):
                assert set(completion.versions.tolist()) == {version}
                assert deviations(qwen2.reference, pending.request, completion).max() < EXACT
        await pool.close()
        done = [kind for kind, _ in itertools.groupby(span.kind for span in read_timeline(tmp_path))]
        assert [kind for kind in done if kind != "wait"] == ["generate", "update", "generate"]

        assert len(members(server.process.pid)) > 2
        server.process.kill()
        server.process.wait()
        gone(server.process.pid)


@pytest.mark.vllm
@pytest.mark.nightly
async def test_a_vllm_that_is_killed_ends_its_wrapper_with_one_line(qwen2, tmp_path):
    """What vLLM had started is left behind, in the wrapper's group, which the launcher kills."""
    with vllm(qwen2.base, tmp_path / "ready.json") as server:
        client = GenerationClient(server.url)
        await client.identify()
        await client.close()
        [child] = psutil.Process(server.process.pid).children()
        child.kill()
        _, errors = server.process.communicate(timeout=240)
        assert server.process.returncode == 1
        assert errors == f"areal: error: vLLM exited with code -9; see {tmp_path / 'ready.log'}\n"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        gone(server.process.pid)
