"""Generation on a GPU: the embedded engine against transformers, and vLLM's own server."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import join_completions
from areal_core.controller.pool import GenerationPool
from areal_core.storage import weights as published
from tests.support.generation import LLAMA_GQA, SPECS, Reference, request, weights, write
from tests.support.offline import OfflineEngine, gathered


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return dataclasses.replace(SPECS[request.param], context=512)


def test_logprobs_across_an_update_are_those_of_transformers(spec, tmp_path):
    reference = Reference(tmp_path, spec, {0: 1, 1: 2})
    engine = OfflineEngine(spec, weights(spec, 1), slots=32, device="cuda")
    asked = [request(f"r{i}", range(2, 5 + i), n=4, max_tokens=400, seed=i, stop_token_ids=()) for i in range(8)]
    for item in asked:
        engine.add(item)
    ended = [done for _ in range(100) for done in engine.step()]
    assert not ended
    engine.swap(engine.prepare(weights(spec, 2)), 1)
    while engine.running or engine.waiting:
        ended += engine.step()
    completions = gathered(ended)
    for item in asked:
        assert len(completions[item.request_id]) == item.n
        for completion in completions[item.request_id]:
            assert set(completion.versions.tolist()) == {0, 1}
            reference.check(item, completion)


SPEC = dataclasses.replace(
    LLAMA_GQA, hidden_size=256, heads=4, kv_heads=2, head_dim=64, intermediate_size=512, context=2048
)
NOISE = 2e-3  # nats: vLLM's kernels and transformers', both in float32


@contextlib.contextmanager
def serving(python, model, scratch, *options):
    ready = scratch / "ready.json"
    command = [sys.executable, "-m", "areal_core.generation.vllm.server", "--python", python, "--model", str(model)]
    command += ["--ready-file", str(ready), "--slots", "32", "--context", "2048", "--dtype", "float32"]
    command += ["--memory-share", "0.3", "--log-file", str(scratch / "vllm.log"), *options]
    process = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    try:
        deadline = time.monotonic() + 400
        while not ready.exists():
            assert process.poll() is None, (scratch / "vllm.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server never became ready"
            time.sleep(0.2)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The base model's folder, version 0 and 1, and transformers' log-probabilities of both."""
    root = tmp_path_factory.mktemp("versions")
    base = write(root / "base", SPEC, 1)
    tensors = {number: {n: t.numpy() for n, t in weights(SPEC, number + 1).items()} for number in (0, 1)}
    made = {number: published.publish(root / "weights", number, values) for number, values in tensors.items()}
    return base, made, Reference(root / "reference", SPEC, {0: 1, 1: 2})


async def test_an_update_from_a_file_interrupts_completions(vllm_python, versions, tmp_path):
    base, made, reference = versions
    asked = [
        PendingCompletions(request(f"r{i}", range(2, 6), n=4, max_tokens=1000, seed=i, stop_token_ids=()))
        for i in (0, 1)
    ]
    with serving(vllm_python, base, tmp_path) as url:
        pool = GenerationPool(completions_per_server=64)
        await pool.join("a", url, lambda: made[0])
        calls = [asyncio.ensure_future(pool.generate(pending)) for pending in asked]
        while sum(load.generated_tokens for load in await pool.loads()) < 400:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)
        await pool.load_version(made[1])
        await asyncio.gather(*calls)
        await pool.close()
    counts = {0: 0, 1: 0}
    for pending in asked:
        for completion in join_completions(pending.completions()):
            assert len(completion.token_ids) == 1000
            reference.check(pending.request, completion, noise=NOISE)
            for number in counts:
                counts[number] += int((completion.versions == number).sum())
    assert min(counts.values()) > 0


async def test_a_server_that_sleeps_gives_its_memory_back(vllm_python, versions, tmp_path):
    base, made, reference = versions
    with serving(vllm_python, base, tmp_path, "--sleep") as url:
        pool = GenerationPool(completions_per_server=64, interruption="wait")
        await pool.join("a", url, lambda: made[0])
        awake = torch.cuda.mem_get_info()[0]
        await pool.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        await pool.wake_up()
        await pool.load_version(made[1])
        pending = PendingCompletions(request("r", n=2, max_tokens=50, stop_token_ids=()))
        await pool.generate(pending)
        await pool.close()
    for completion in join_completions(pending.completions()):
        assert set(completion.versions.tolist()) == {1}
        reference.check(pending.request, completion, noise=NOISE)
    assert asleep - awake > 0.2 * torch.cuda.mem_get_info()[1]  # of the 0.3 that it was started with
