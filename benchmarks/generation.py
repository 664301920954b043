"""How fast does the embedded engine generate on one core, beside transformers and vLLM on the same core?

    python -m benchmarks.generation [--rounds 5] [--window 5] [field=value ...]

Every arm is a real process pinned to one core; HTTP clients run on another. The model is the warmed-up base model of a
run, so that lengths are real, and the prompts are those of the default task. Requests of 16 completions wait at the
servers, so that each always decodes 64 completions. All arms start first, then are measured in turns; figures are
medians over rounds.

- `tokens_per_s_per_core`: the embedded server over HTTP with the default model (width 64, 3 layers, 4 heads of 16);
- `tokens_per_s_per_core_t256`: the same with completions of 256 tokens each, end tokens ignored;
- `over_transformers`, `over_vllm_cpu`: the embedded server's tokens/s over theirs, within a round, on one model that
  all three can run. It is the default model with 2 heads (experiment `cpu-vllm`), as vLLM's attention on CPUs needs
  heads of 32. transformers' `generate()` runs batches of 4 prompts x 16 completions, each as long as its longest
  completion. vLLM gets the same requests as the embedded server;
- `gemm_share`: floating-point operations per second of the linear layers alone, at the default model's tokens/s, over
  those of one large float32 product on that core in the same round;
- `swap_ms`: swap of the model weights between two steps, by the server's clock, while it decodes (without recomputation
  of the KV cache). `swap_100m_ms`: the same for 100M float32 parameters, beside `copy_100m_ms`, a copy of as many bytes
  into new memory;
- `staging_100m_ms`: read, check and stage a file of as many parameters from the page cache. Decoding continues
  meanwhile.

Tokens/s are by wall time; `cpu_s_share` is the share of the core that each arm got, in case other processes use the
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from areal_core.__main__ import configuration
from areal_core.api.pending_completions import Received
from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.errors import ArealError, ConfigError, ProcessError
from areal_core.generation.client import GenerationClient
from areal_core.launch.supervisor import CHILD_ENV
from areal_core.models.spec import ModelSpec, read_spec
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.folders import base_model
from areal_core.storage import weights
from areal_core.types import GenerationRequest, PolicyVersion
from benchmarks import _harness

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
OFFLINE = "benchmarks._generation_offline"
SLOTS, GROUP = 64, 16  # completions being decoded, completions of a request
REQUESTS = 4 * SLOTS // GROUP  # in flight: while the last completions of one are decoded, others fill the slots
LONG = 256  # tokens of a long completion
_LONG_CONTEXT = 320
_LEAD_IN_S = 1.0  # before a window, for a steady state
_START_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens and time of an arm in one window."""

    tokens: int
    wall_s: float
    cpu_s: float  # of all its processes

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to an arm, repeated endlessly."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    def request(self, number: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"r{number}",
            token_ids=self.prompts[number % len(self.prompts)],
            n=GROUP,
            max_tokens=self.max_tokens,
            seed=number,
            stop_token_ids=self.stop_token_ids,
        )


class Child:
    """A process pinned to one core, with its child processes."""

    def __init__(self, argv: list[str], core: int, **options: Any) -> None:
        self._popen = subprocess.Popen(
            ["taskset", "-c", str(core), *argv],
            cwd=ROOT,
            env=os.environ | CHILD_ENV,
            **options,
        )
        self._core = core
        self._process = psutil.Process(self._popen.pid)

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())

    def pin(self) -> None:
        """Pin the process again, for threads that have moved to other cores."""
        for process in self._tree():
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {self._core})

    def ask(self, **what: Any) -> dict[str, Any]:
        """Send a request as a line of JSON; return the result, also a line of JSON."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(orjson.dumps(what) + b"\n")
        self._popen.stdin.flush()
        response = self._popen.stdout.readline()
        if not response:
            raise ProcessError(f"{' '.join(map(str, self._popen.args))} exited with status {self._popen.wait()}")  # type: ignore
        return orjson.loads(response)

    def wait_for(self, file: Path) -> str:
        """Wait for a ready file; return its URL."""
        deadline = time.monotonic() + _START_S
        while not file.exists():
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise ProcessError(f"{file.stem} did not start in time; see its output above")
            time.sleep(0.05)
        self.pin()
        return orjson.loads(file.read_bytes())["url"]

    def end(self) -> None:
        self._popen.terminate()
        self._popen.wait()

    def _tree(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


async def served(url: str, child: Child, load: Load, seconds: float) -> Window:
    """Send requests to a server, a constant number in flight; count tokens of those that end within the window."""
    client = GenerationClient(url)
    await client.identify()
    numbers = itertools.count(int(time.time() * 1000) % 2**30)
    tokens = 0

    def count(_: tuple[int, ...], received: Received) -> None:
        nonlocal tokens
        tokens += sum(choice.tokens for choice in received.choices)

    async def ask() -> None:
        while True:
            await client.generate(load.request(next(numbers)), count)

    asking = [asyncio.ensure_future(ask()) for _ in range(REQUESTS)]
    try:
        await asyncio.wait(asking, timeout=_LEAD_IN_S, return_when=asyncio.FIRST_EXCEPTION)
        before, cpu_s, start = tokens, child.cpu_s(), time.monotonic()
        await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        window = Window(tokens=tokens - before, wall_s=time.monotonic() - start, cpu_s=child.cpu_s() - cpu_s)
        for task in asking:
            if task.done():
                task.result()
        if not window.tokens:
            raise ProcessError(f"--window: too short, as {url} finished no request in {seconds:g} s; raise it")
        return window
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        with contextlib.suppress(ArealError):
            await client.abort_all()
        await client.close()


async def swapped(url: str, load: Load, versions: list[PolicyVersion]) -> list[float]:
    """Milliseconds of each swap of model weights while the server decodes."""
    client = GenerationClient(url)
    swaps: list[float] = []

    async def ask(number: int) -> None:
        while True:
            await client.generate(load.request(number), lambda *_: None)

    asking = [asyncio.ensure_future(ask(number)) for number in range(REQUESTS)]
    try:
        for version in versions:
            await asyncio.sleep(0.1)
            await client.load_version(version, "recompute")
            swaps.append((await client.load()).swap_ms)
        return swaps
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await client.close()


def linear_flops(spec: ModelSpec) -> int:
    """Floating-point operations of the linear layers for one token."""
    attention = spec.hidden_size * (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return 2 * (spec.layers * (attention + mlp) + spec.hidden_size * spec.vocab_size)


class Bench:
    """All arms, started and pinned."""

    def __init__(self, configs: Mapping[str, RunConfig], scratch: Path, core: int, stack: contextlib.ExitStack) -> None:
        self._core, self._scratch, self._stack = core, scratch, stack
        folders = {name: base_model(config, _harness.tell) for name, config in configs.items()}
        self.spec = read_spec(folders["default"])
        long = _with_context(folders["default"], scratch / "long", _LONG_CONTEXT)
        self.load = _load(configs["default"], folders["default"])
        self._long_load = dataclasses.replace(self.load, max_tokens=LONG, stop_token_ids=())
        self.versions = [
            weights.publish(scratch, 1 + place % 2, _arrays(folders["default"], 1.0 + place % 2 * 1e-3))
            for place in range(2)
        ]
        context = configs["default"].model.context
        self._servers = {
            "default": self._serve("default", folders["default"], context),
            "long": self._serve("long", long, _LONG_CONTEXT),
            "wide_heads": self._serve("wide-heads", folders["wide_heads"], context),
            "vllm": self._serve("vllm", folders["wide_heads"], context, vllm=True),
        }
        self._offline = self._child(
            [sys.executable, "-m", OFFLINE, "--model", str(folders["wide_heads"]), "--scratch", str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def round(self, seconds: float) -> dict[str, Any]:
        """Measure one window of every arm, and the other figures."""
        measured: dict[str, Any] = {}
        for name, (url, child) in self._servers.items():
            load = self._long_load if name == "long" else self.load
            measured[name] = asyncio.run(served(url, child, load, seconds))
        measured["transformers"] = Window(
            **self._offline.ask(
                do="generate", prompts=self.load.prompts, group=GROUP, requests=SLOTS // GROUP,
                max_tokens=self.load.max_tokens, seconds=seconds,
            )
        )  # fmt: skip
        measured["gemm_flops"] = self._offline.ask(do="gemm")["flops"]
        measured |= self._offline.ask(do="stage")
        measured["swap_ms"] = asyncio.run(swapped(self._servers["default"][0], self.load, self.versions))
        return measured

    def _serve(self, name: str, model: Path, context: int, *, vllm: bool = False) -> tuple[str, Child]:
        module = "areal_core.generation." + ("vllm.server" if vllm else "server.routes")
        ready = self._scratch / f"{name}.json"
        options = ["--model", model, "--slots", SLOTS, "--context", context, "--ready-file", ready]
        if vllm:
            options += ["--python", VLLM_PYTHON, "--log-file", self._scratch / "vllm.log"]
        _harness.tell(f"starting {name}")
        child = self._child([sys.executable, "-m", module, *map(str, options)], stdout=sys.stderr)
        return child.wait_for(ready), child

    def _child(self, argv: list[str], **options: Any) -> Child:
        child = Child(argv, self._core, **options)
        self._stack.callback(child.end)
        return child


def measure(rounds: int, seconds: float, overrides: list[str]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("this benchmark needs two cores; one is for the client")
    if not VLLM_PYTHON.exists():
        raise ConfigError(f"{VLLM_PYTHON.parents[1]} is missing; create it with `make bench NAME=generation`")
    common = ["name=bench-generation", "tracking.enabled=false", *overrides]
    configs = {
        "default": configuration({}, common),
        "wide_heads": configuration({}, [*common, "model.heads=2", "model.kv_heads=2"]),
    }
    Path(configs["default"].state_dir).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-generation-")))
        bench = Bench(configs, scratch, cores[-1], stack)
        os.sched_setaffinity(0, set(cores[:-1]))
        measured = []
        for number in range(rounds):
            measured.append(bench.round(seconds))
            _harness.tell(f"round {number + 1} of {rounds}: {_shown(measured[-1])}")
        return _figures(measured, bench.spec)


ARMS = ("default", "long", "wide_heads", "vllm", "transformers")


def _figures(rounds: list[dict[str, Any]], spec: ModelSpec) -> dict[str, Any]:
    speeds = {arm: [each[arm].tokens_per_s for each in rounds] for arm in ARMS}
    swaps = [swap for each in rounds for swap in each["swap_ms"]]

    def median(name: str) -> float:
        return statistics.median(each[name] for each in rounds)

    def over(peer: str) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(speeds["wide_heads"], speeds[peer], strict=True))

    shares = [linear_flops(spec) * each["default"].tokens_per_s / each["gemm_flops"] for each in rounds]
    return {
        "tokens_per_s_per_core": round(statistics.median(speeds["default"])),
        "tokens_per_s_per_core_t256": round(statistics.median(speeds["long"])),
        "over_transformers": round(over("transformers"), 2),
        "over_vllm_cpu": round(over("vllm"), 2),
        "gemm_share": round(statistics.median(shares), 3),
        "swap_ms": round(statistics.median(swaps), 3),
        "swap_100m_ms": round(median("swap_large_ms"), 3),
        "staging_100m_ms": round(median("stage_ms"), 1),
        "copy_100m_ms": round(median("copy_ms"), 1),
        "gemm_gflops": round(median("gemm_flops") / 1e9, 1),
        "tokens_per_s": {arm: [round(speed) for speed in values] for arm, values in speeds.items()},
        "tokens_per_cpu_s": {
            arm: round(statistics.median(each[arm].tokens / each[arm].cpu_s for each in rounds)) for arm in ARMS
        },
        "cpu_s_share": {
            arm: round(statistics.median(each[arm].cpu_s / each[arm].wall_s for each in rounds), 2) for arm in ARMS
        },
    }


def _load(config: RunConfig, model: Path) -> Load:
    source = open_source(config, Tokenizer.from_folder(str(model)))
    return Load(
        prompts=tuple(source.prompt(index).token_ids for index in range(512)),
        max_tokens=config.task.max_new_tokens,
        stop_token_ids=read_spec(model).eos_token_ids,
    )


def _arrays(folder: Path, factor: float) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return {name: array * array.dtype.type(factor) for name, array in load_file(folder / "model.safetensors").items()}


def _with_context(model: Path, copy: Path, context: int) -> Path:
    """The same model weights with a longer context."""
    shutil.copytree(model, copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": context}))
    return copy


def _shown(measured: Mapping[str, Any]) -> str:
    arms = ", ".join(f"{arm} {measured[arm].tokens_per_s:.0f}" for arm in ARMS)
    return f"{arms} tokens/s; matrix product {measured['gemm_flops'] / 1e9:.0f} GFLOP/s"


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=_harness.positive, default=5)
    parser.add_argument("--window", type=float, default=5.0, help="seconds per arm and round")
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: measure(arguments.rounds, arguments.window, arguments.overrides))


if __name__ == "__main__":
    main()
