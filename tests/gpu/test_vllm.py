"""vLLM's own server on one GPU: files, CUDA IPC from a trainer beside it, sleep; NCCL where there are two GPUs."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from aiohttp import web

from areal_core.api.transcript import Transcript
from areal_core.api.wire import join_completions
from areal_core.controller.pool import GenerationPool
from areal_core.controller.weight_transfer import transfer_routes
from areal_core.storage import weights as published
from tests.support.generation import LLAMA_GQA, Reference, request, weights, write

SPEC = dataclasses.replace(
    LLAMA_GQA, hidden_size=256, heads=4, kv_heads=2, head_dim=64, intermediate_size=512, context=2048
)
NOISE = 2e-3  # nats: vLLM's kernels and transformers', both in float32


@contextlib.contextmanager
def serving(python, model, scratch, *options, device="0"):
    ready = scratch / "ready.json"
    command = [sys.executable, "-m", "areal_core.generation.vllm.server", "--python", python, "--model", str(model)]
    command += ["--ready-file", str(ready), "--slots", "32", "--context", "2048", "--dtype", "float32"]
    command += ["--memory-share", "0.3", "--log-file", str(scratch / "vllm.log"), *options]
    process = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": device})
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
    return base, made, tensors, Reference(root / "reference", SPEC, {0: 1, 1: 2})


async def interrupted(pool, load, reference):
    """Completions that an update interrupted, checked against transformers; how many tokens of either version."""
    asked = [Transcript(request(f"r{i}", range(2, 6), n=4, max_tokens=1000, seed=i, stop_token_ids=())) for i in (0, 1)]
    calls = [asyncio.ensure_future(pool.generate(transcript)) for transcript in asked]
    while sum(load.generated_tokens for load in await pool.loads()) < 400:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.01)
    await load()
    await asyncio.gather(*calls)
    counts = {0: 0, 1: 0}
    for transcript in asked:
        for completion in join_completions(transcript.completions()):
            assert len(completion.token_ids) == 1000
            reference.check(transcript.request, completion, noise=NOISE)
            for number in counts:
                counts[number] += int((completion.versions == number).sum())
    return counts


async def test_files(vllm_python, versions, tmp_path):
    base, made, _, reference = versions
    with serving(vllm_python, base, tmp_path) as url:
        pool = GenerationPool(completions_per_server=64)
        await pool.join("a", url, lambda: made[0])
        counts = await interrupted(pool, lambda: pool.load_version(made[1]), reference)
        await pool.close()
    assert min(counts.values()) > 0


@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
async def test_weights_come_from_the_trainers_gpu(vllm_python, versions, tmp_path, transfer):
    pytest.importorskip("vllm", reason="the trainer sends with vLLM's engine: run this in vLLM's environment")
    if transfer == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank: two, and there is one")
    from areal_core.training.distributed.weight_sender import VllmSender

    base, made, tensors, reference = versions
    device = "1" if transfer == "nccl" else "0"
    with serving(vllm_python, base, tmp_path, "--transfer", transfer, device=device) as url:
        pool = GenerationPool(completions_per_server=64, transfer=transfer)
        await pool.join("a", url, lambda: made[0])
        app = web.Application()
        app.add_routes(transfer_routes(pool.transfer, lambda: made[1]))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        controller = _Controller("http://{}:{}".format(*runner.addresses[0][:2]))
        sender = VllmSender(controller, transfer, "float32")

        async def load():
            await asyncio.gather(pool.load_version(made[1]), asyncio.to_thread(sender.send, made[1], tensors[1]))

        counts = await interrupted(pool, load, reference)
        assert pool.version == 1
        assert not (await pool.transfer.group(1))["needed"]
        await pool.close()
        await runner.cleanup()
    assert min(counts.values()) > 0


async def test_a_server_that_sleeps_gives_its_memory_back(vllm_python, versions, tmp_path):
    base, made, _, reference = versions
    with serving(vllm_python, base, tmp_path, "--sleep") as url:
        pool = GenerationPool(completions_per_server=64, interruption="wait")
        await pool.join("a", url, lambda: made[0])
        awake = torch.cuda.mem_get_info()[0]
        await pool.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        await pool.wake_up()
        await pool.load_version(made[1])
        transcript = Transcript(request("r", n=2, max_tokens=50, stop_token_ids=()))
        await pool.generate(transcript)
        await pool.close()
    for completion in join_completions(transcript.completions()):
        assert set(completion.versions.tolist()) == {1}
        reference.check(transcript.request, completion, noise=NOISE)
    assert asleep - awake > 0.2 * torch.cuda.mem_get_info()[1]  # of the 0.3 that it was started with


class _Controller:
    """What `VllmSender` asks of a ControllerClient."""

    def __init__(self, url):
        self._url = url

    def transfer_group(self, version):
        with urllib.request.urlopen(f"{self._url}/transfer?version={version}", timeout=60) as response:
            return json.load(response)

    def transfer_url(self):
        return f"{self._url}/transfer"

    authorization = {}  # noqa: RUF012 - as a property gives it
