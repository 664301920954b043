"""vLLM as a process of a run: how it becomes ready, how it ends, and the error when it can't start."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from areal_core.api.pending_completions import PendingCompletions
from areal_core.api.wire import join_completions
from areal_core.controller.pool import GenerationPool
from areal_core.generation.client import GenerationClient
from areal_core.tracking.timeline import TimelineWriter, read_timeline
from tests.support.generation import request
from tests.support.live_servers import EXACT, QWEN2, Server, deviations, members, publish, start, url_of
from tests.support.processes import wait_for

FAKE = """#!/bin/sh
# An interpreter that says that it has vLLM.
echo '{"vllm": "0.32.0"}'
"""


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


def child_of(process):
    [child] = [pid for pid in members(process.pid) if parent(pid) == process.pid]
    return child


def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


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
        os.kill(child_of(server.process), signal.SIGKILL)
        _, errors = server.process.communicate(timeout=240)
        assert server.process.returncode == 1
        assert errors == f"areal: error: vLLM ended with code -9; see {tmp_path / 'ready.log'}\n"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        gone(server.process.pid)


def test_a_port_in_use_is_one_line_that_names_it(tmp_path):
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    command = ["-m", "areal_core.generation.vllm.server", "--python", python, "--model", tmp_path, "--context", 64]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, *map(str, command), "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in ended.stderr
