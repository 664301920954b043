"""Generation servers as processes, the embedded one and vLLM's own, and calls of both for tests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from areal_core.api.wire import ServerLoad
from areal_core.generation.client import GenerationClient
from areal_core.models.folders import ModelSpec
from areal_core.models.verified import weights_digest
from areal_core.storage import weights as versions
from areal_core.types import Completion, GenerationRequest, PolicyVersion
from tests.support import slow
from tests.support.generation import LLAMA_GQA, Reference, weights, write
from tests.support.processes import entries, wait_for

CONTEXT = 4096
SLOTS = 16
# vLLM's attention on a CPU wants heads of 32 or 64 channels.
SPEC = dataclasses.replace(
    LLAMA_GQA, hidden_size=64, heads=2, kv_heads=1, head_dim=32, context=CONTEXT, eos_token_ids=(1,)
)
QWEN2 = dataclasses.replace(SPEC, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=True)
SEEDS = {0: 1, 1: 2, 2: 3}  # version -> seed of its weights
LENGTH = 600  # tokens: of a completion that is far from its end when slow steps are over
LONG = 4000  # tokens: a completion that outlasts whatever a test does meanwhile
EXACT = 1.0  # deviation that rounding allows
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
REQUIRE_VLLM = "AREAL_REQUIRE_VLLM"
_MODULES = {"embedded": "tests.support.slow", "vllm": "areal_core.generation.vllm.server"}
_SLOW_VLLM = "--logits-processors tests.support.slow_vllm:Slow"
_START_S = {"embedded": 240, "vllm": 600}
_END_S = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A server that is ready."""

    kind: str  # embedded or vllm
    url: str
    process: subprocess.Popen[str]
    ready: Path
    token: str | None = None  # what it wants every request to carry

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """A block in which every decode step takes a while, so that nothing in it comes after a completion's end."""
        file = _slow_while(self.ready)
        file.touch()
        try:
            yield
        finally:
            file.unlink()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A model in its versions, and transformers' log-probabilities under all of them."""

    base: Path
    versions: dict[int, PolicyVersion]  # 0 is the base model
    reference: Reference


def publish(root: Path, spec: ModelSpec, seeds: dict[int, int]) -> Published:
    base = write(root / "base", spec, seeds[0])
    zero = PolicyVersion(version=0, path=str(base), digest=weights_digest(base / "model.safetensors"))
    later = {
        version: versions.publish(
            root / "weights", version, {name: tensor.numpy() for name, tensor in weights(spec, seed).items()}
        )
        for version, seed in seeds.items()
        if version
    }
    return Published(base=base, versions={0: zero} | later, reference=Reference(root / "reference", spec, seeds))


def start(kind: str, model: Path, ready: Path, *options: object) -> subprocess.Popen[str]:
    """A server's process, in a group of its own."""
    if kind == "vllm":
        require_vllm()
        log = ("--log-file", ready.with_suffix(".log"))
        given = ("--context", CONTEXT, "--slots", SLOTS, f"--arguments={_SLOW_VLLM}")
        options = ("--python", VLLM_PYTHON, *given, *log, *options)
    command = [sys.executable, "-m", _MODULES[kind], "--model", model, "--ready-file", ready, *options]
    return subprocess.Popen(
        list(map(str, command)),
        env=os.environ | {"OMP_NUM_THREADS": "1", slow.FILE: str(_slow_while(ready))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _slow_while(ready: Path) -> Path:
    return ready.with_suffix(".slow")


def url_of(process: subprocess.Popen[str], ready: Path, kind: str = "embedded") -> str:
    def is_ready() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return ready.exists()

    wait_for(is_ready, "the server is ready", _START_S[kind])
    return json.loads(ready.read_text())["url"]


@contextlib.contextmanager
def serving(kind: str, model: Path, ready: Path, *options: object) -> Iterator[Server]:
    """A server until the end of the block; it must end by SIGTERM, with status 0 and with all that it started."""
    process = start(kind, model, ready, *options)
    try:
        yield Server(kind=kind, url=url_of(process, ready, kind), process=process, ready=ready)
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=_END_S)
    assert (process.returncode, errors) == (0, ""), f"{process.returncode}: {errors}"
    assert members(process.pid) == []


def members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found: list[int] = []
    for entry in entries():
        with contextlib.suppress(OSError):
            state, _, pgrp, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(pgrp) == group and state != "Z":
                found.append(int(entry.name))
    return found


def require_vllm() -> None:
    if VLLM_PYTHON.exists():
        return
    if os.environ.get(REQUIRE_VLLM):
        pytest.fail(f"{VLLM_PYTHON} does not exist, and {REQUIRE_VLLM} is set: `make test-vllm` sets it up")
    pytest.skip("needs vLLM in .venv-vllm: `make test-vllm` sets it up")


def deviations(reference: Reference, asked: GenerationRequest, completion: Completion) -> np.ndarray:
    """[L] between each log-probability and that of the version that the token names, over the whole text before it, at
    the temperature of the request, as multiples of what rounding allows: some 1e-4 nats."""
    expected, allowed = reference.logprobs(asked, completion)
    return np.abs(completion.logprobs - expected) / allowed


def body(token_ids: Sequence[int] = (2, 3, 4), **params: object) -> dict[str, Any]:
    sampling = {"max_tokens": 8, "seed": 7, "logprobs": 0, "ignore_eos": True} | params
    return {"model": "policy", "token_ids": list(token_ids), "sampling_params": sampling}


async def post(http: aiohttp.ClientSession, path: str, value: object = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    data = None if value is None else orjson.dumps(value)
    async with http.post(path, data=data, headers=headers if data else None) as response:
        return response.status, await response.json(content_type=None)


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with http.get(path) as response:
        return response.status, await response.json(content_type=None)


async def sample(http: aiohttp.ClientSession, value: dict[str, Any]) -> dict[str, Any]:
    """The first choice of a response."""
    status, response = await post(http, "/inference/v1/generate", value)
    assert status == 200, response
    return response["choices"][0]


async def until(client: GenerationClient, condition: Callable[[ServerLoad], bool]) -> ServerLoad:
    async with asyncio.timeout(240):
        while not condition(load := await client.load()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01 if client.in_place else 0.1)  # vLLM takes long to write its metrics
    return load
