"""What does a new version cost the trainer, the servers, and the network between machines?

    make bench NAME=publish [ARGS="--rounds 7 --short"]

For a model of 1.2 GB in float32, on one core; `--short` takes a small model, for tests.

- `publish_over_cp`: speed from the weights in the engine to the announced version, by the trainer's `Publisher`, over
  the speed of `cp` of the same file in the same file system, in turns: the median and its interval.
  `publish_over_cp_cpu`: the same in CPU seconds, which depend less on other processes of a busy machine;
- `blocked_over_copy`: time that a version blocks the trainer, including the wait for the previous one, over a copy of
  as many bytes between two arrays. Between two versions the trainer's core computes for `--step` seconds;
- `swap_ms`: swap of the model weights in the embedded engine while it decodes, without recomputation;
- `http_gb_per_cpu_s`: GB of a version from machine to machine, per CPU second of the side that serves it and of the
  side that fetches, hashes and writes it; the lower one;
- `one_fetch`: requests for a version if eight servers of a machine ask for it at once;
- `damaged_refused`: share of damaged, torn and mislabelled versions that a server refuses while it serves.
  `served_meanwhile`: completions in that time, all of version 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
import psutil
from aiohttp import web
from numpy.typing import NDArray

from areal_core.api.head import Head, fetch
from areal_core.config.schema import RunConfig, load
from areal_core.generation.client import GenerationClient
from areal_core.models.spec import ModelSpec, weight_shapes
from areal_core.models.verified import weights_digest
from areal_core.run.remote.files import DataServer
from areal_core.run.remote.stager import Stager
from areal_core.storage import weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.training import publisher as publisher_module
from areal_core.training.publisher import Publisher
from areal_core.types import GenerationRequest, PolicyVersion
from benchmarks import _harness
from benchmarks.generation import Child
from flows.comparison.intervals import Interval, median_interval

_LARGE = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=32000,
    hidden_size=1024,
    layers=16,
    heads=16,
    kv_heads=16,
    head_dim=64,
    intermediate_size=4096,
    qkv_bias=True,
    tie_embeddings=True,
    context=256,
    eos_token_ids=(0,),
)
SMALL = dataclasses.replace(
    _LARGE, vocab_size=256, hidden_size=64, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate_size=128
)
_PER_ROUND = 3  # versions, between two of which the trainer computes
_SERVERS = 8
_DAMAGES = ("flipped", "torn", "longer", "another file", "another hash", "not finite", "too few", "no file")


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--rounds", type=_harness.positive, default=7)
    parser.add_argument("--step", type=float, default=4.0, help="seconds of a training step")
    parser.add_argument(
        "--damaged", type=_harness.positive, default=1000, help="number of versions that the server must refuse"
    )
    parser.add_argument("--short", action="store_true", help="use a small model")
    options = parser.parse_args()
    spec, step_s = (SMALL, 0.02) if options.short else (_LARGE, options.step)
    _harness.report(lambda: measure(spec, rounds=options.rounds, step_s=step_s, damaged=options.damaged))


def measure(spec: ModelSpec, *, rounds: int, step_s: float, damaged: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as folder, _one_core():
        scratch = Path(folder)
        found = {"gb": round(4e-9 * spec.parameters, 3), **_published(spec, scratch / "trainer", rounds, step_s)}
        _harness.tell(f"{found}")
        found |= _between_machines(spec, scratch / "machines", rounds)
        _harness.tell(f"{found}")
        found |= _swapped(spec, scratch / "server", rounds)
        _harness.tell(f"{found}")
        return found | asyncio.run(_damaged(scratch / "damaged", damaged))


@contextmanager
def _one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _timed(do: Callable[[], object]) -> float:
    since = time.perf_counter()
    do()
    return time.perf_counter() - since


def _figures(name: str, interval: Interval) -> dict[str, Any]:
    return {name: round(interval.median, 3), f"{name}_interval": [round(interval.low, 3), round(interval.high, 3)]}


def _run(folder: Path, model: Path) -> tuple[RunDir, RunConfig]:
    config = load({"state_dir": str(folder), "storage": {"url": str(folder / "store")}})
    info = RunInfo(run_id="r", model_path=str(model), checkpoint_url=str(folder / "store"))
    return RunDir.create(config, info), config


def _arrays(spec: ModelSpec, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    made = np.random.default_rng(seed)
    return {
        name: made.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in weight_shapes(spec).items()
    }


# -- the trainer ---------------------------------------------------------------------------------------------------


class _Controller:
    """Stand-in controller for a publisher. Releases every version except the announced one."""

    def __init__(self) -> None:
        self.announced_at = 0.0, 0.0  # by the clock, and in CPU seconds of this process

    def announce(self, version: PolicyVersion) -> list[int]:
        self.announced_at = time.perf_counter(), time.process_time()
        return [version.version - 2]

    def metrics(self, rows: object) -> None:
        pass


def _published(spec: ModelSpec, folder: Path, rounds: int, step_s: float) -> dict[str, Any]:
    import torch

    from areal_core.training.engines.torch_engine import TorchEngine

    torch.set_num_threads(1)
    (folder / "base").mkdir(parents=True)
    run, config = _run(folder, folder / "base")
    run.weights.mkdir(exist_ok=True)
    engine = TorchEngine(
        spec,
        {name: torch.from_numpy(array) for name, array in _arrays(spec).items()},
        config.training,
        config.algorithm,
    )
    controller, steps = _Controller(), itertools.count(1)
    with mock.patch.object(publisher_module, "ControllerClient", return_value=controller):
        publisher = Publisher(run, config, Storage.open(run.info().checkpoint_url))
    target = np.zeros_like(engine.flat.numpy())
    published: list[tuple[float, float]] = []  # seconds, and CPU seconds
    copied: list[tuple[float, float]] = []
    blocked_s: list[float] = []
    copy_s: list[float] = []

    def publish() -> None:
        publisher.publish(next(steps), engine.served())

    def whole() -> None:
        since, cpu = time.perf_counter(), time.process_time()
        publish()
        publisher.drain()
        published.append((controller.announced_at[0] - since, controller.announced_at[1] - cpu))

    def cp() -> None:
        newest = weights.newest(run.weights)
        assert newest is not None
        source, target = weights.weights_file(Path(newest.path)), folder / "copied"
        before = _children_s()
        seconds = _timed(lambda: subprocess.run(["cp", str(source), str(target)], check=True))
        copied.append((seconds, _children_s() - before))
        target.unlink()

    for _ in range(2):  # the buffers are new, and so is the memory of the first file
        publish()
        publisher.drain()
    for turn in range(rounds):
        for arm in _harness.in_turns(("publish", "cp"), turn):
            {"publish": whole, "cp": cp}[arm]()
        _harness.tell(f"publish {published[-1]}, cp {copied[-1]} (seconds, CPU seconds)")
    for _ in range(rounds):
        publish()
        for _ in range(_PER_ROUND):
            _compute(step_s)
            blocked_s.append(_timed(publish))
        publisher.drain()
        copy_s += [_timed(lambda: np.copyto(target, engine.flat.numpy())) for _ in range(_PER_ROUND)]
        _harness.tell(f"blocked {blocked_s[-1]:.3f} s, copy {copy_s[-1]:.3f} s")
    copy = statistics.median(copy_s)
    pairs = [(cp[0] / own[0], cp[1] / own[1]) for cp, own in zip(copied, published, strict=True)]
    return {
        **_figures("publish_over_cp", median_interval(ratio for ratio, _ in pairs)),
        **_figures("publish_over_cp_cpu", median_interval(ratio for _, ratio in pairs)),
        "publish_s": round(statistics.median(seconds for seconds, _ in published), 3),
        **_figures("blocked_over_copy", median_interval(blocked / copy for blocked in blocked_s)),
        "copy_s": round(copy, 4),
        "step_s": step_s,
    }


def _children_s() -> float:
    """CPU seconds of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _compute(seconds: float) -> None:
    """Compute matrix products on this core, as a training step does."""
    import torch

    matrix = torch.ones(512, 512)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        matrix @ matrix


# -- between machines ----------------------------------------------------------------------------------------------


def _between_machines(spec: ModelSpec, folder: Path, rounds: int) -> dict[str, Any]:
    (folder / "base").mkdir(parents=True)
    run, _ = _run(folder / "head", folder / "base")
    versions = [weights.publish(run.weights, number, _arrays(spec, number)) for number in (1, 2)]
    size = weights.weights_file(Path(versions[0].path)).stat().st_size
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    served = context.Process(target=_serve, args=(run.root, there), daemon=True)
    served.start()
    try:
        head, process = Head(here.recv(), run.token()), psutil.Process(served.pid)

        def get() -> None:
            path = f"/versions/1?digest={versions[0].digest}"
            fetch(head, path, folder / "fetched", versions[0].digest, stopped=bool, patience_s=30.0)

        get()
        theirs, ours = sum(process.cpu_times()[:2]), time.process_time()
        for _ in range(rounds):
            get()
        theirs, ours = sum(process.cpu_times()[:2]) - theirs, time.process_time() - ours
        sides = {
            "serves": round(1e-9 * rounds * size / max(theirs, 0.01), 2),
            "fetches": round(1e-9 * rounds * size / ours, 2),
        }
        other, _ = _run(folder / "node", folder / "base")
        other.weights.mkdir(exist_ok=True)
        asyncio.run(_stage(Stager(other, head, "127.0.0.1", kept=2), versions[1]))
        here.send(None)
        asked = here.recv()
    finally:
        served.terminate()
        served.join()
    return {"http_gb_per_cpu_s": min(sides.values()), "http_sides": sides, "one_fetch": asked["/versions/2"]}


async def _stage(stager: Stager, version: PolicyVersion) -> None:
    staged = await asyncio.gather(*(stager.staged(version) for _ in range(_SERVERS)))
    assert {each.digest for each in staged} == {version.digest}


def _serve(root: Path, pipe: Any) -> None:
    """Serve a run's files in a process of its own; send the URL, and at the end the requests of each file."""
    asked: Counter[str] = Counter()

    @web.middleware
    async def count(request: web.Request, handler: Any) -> web.StreamResponse:
        asked[request.path] += 1
        return await handler(request)

    async def work() -> None:
        app = DataServer(RunDir(root)).app()
        app.middlewares.append(count)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send("http://{}:{}".format(*runner.addresses[0][:2]))
        await asyncio.to_thread(pipe.recv)
        pipe.send(dict(asked))
        await runner.cleanup()

    asyncio.run(work())


# -- a server ------------------------------------------------------------------------------------------------------


def _swapped(spec: ModelSpec, folder: Path, rounds: int) -> dict[str, Any]:
    from areal_core.generation.engines.embedded import Engine
    from areal_core.generation.engines.engine import read_version

    versions = [weights.publish(folder, number, _arrays(spec, number)) for number in (1, 2)]
    engine = Engine(spec, _arrays(spec), slots=4)
    swaps_ms: list[float] = []
    for number in range(2 * rounds):
        if not engine.running:
            engine.add(_request(number, spec.context))
        engine.step()
        version = versions[number % 2]
        prepared = read_version(engine, Path(version.path), version.digest)
        swaps_ms.append(1e3 * _timed(partial(engine.swap, prepared, number + 1, recompute=False)))
        del prepared
    return {"swap_ms": {"median": round(statistics.median(swaps_ms), 4), "largest": round(max(swaps_ms), 4)}}


def _request(number: int, tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}", token_ids=(1, 2), n=2, max_tokens=tokens - 2, seed=number, stop_token_ids=()
    )


async def _damaged(folder: Path, count: int) -> dict[str, Any]:
    import torch

    from areal_core.models.folders import write_model

    base, drawn = folder / "base", random.Random(0)
    write_model(base, SMALL, {name: torch.from_numpy(array) for name, array in _arrays(SMALL).items()}, None)
    good = [weights.publish(folder / "weights", number, _arrays(SMALL, number)) for number in (1, 2)]
    ready = folder / "ready.json"
    options = ["--model", base, "--slots", 8, "--ready-file", ready]
    routes = [sys.executable, "-m", "areal_core.generation.server.routes", *map(str, options)]
    child = Child(routes, max(os.sched_getaffinity(0)), stdout=sys.stderr)
    try:
        client = GenerationClient(await asyncio.to_thread(child.wait_for, ready))
        await client.identify()
        seen: Counter[int] = Counter()
        serving = asyncio.ensure_future(_complete(client, seen))
        refused: Counter[str] = Counter()
        async with aiohttp.ClientSession(client.url) as session:
            for number in range(count):
                kind = _DAMAGES[number % len(_DAMAGES)]
                refused[kind] += await _refuses(session, _spoiled(folder / "spoiled", kind, good, drawn))
                if serving.done():
                    serving.result()
        served, versions = seen.total(), set(seen)
        await client.load_version(good[0], "recompute")
        loaded = await client.loaded_version()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await client.close()
    finally:
        child.end()
    assert (versions, loaded) == ({0}, 1), (
        f"served versions {versions} during the refusals, and version {loaded} at the end"
    )
    return {"damaged_refused": refused.total() / count, "refused": dict(refused), "served_meanwhile": served}


async def _complete(client: GenerationClient, seen: Counter[int]) -> None:
    for number in itertools.count():
        for completion in await client.complete(_request(number, 34)):
            seen[int(completion.versions[-1])] += 1


async def _refuses(session: aiohttp.ClientSession, version: PolicyVersion) -> bool:
    """Whether the server refuses to stage a version. A staged version is not swapped in."""
    async with session.post("/start_weight_update", raise_for_status=True):
        info = {"path": version.path, "digest": version.digest}
    async with session.post("/update_weights", json={"update_info": info}) as response:
        return response.status != 200


def _spoiled(folder: Path, kind: str, good: list[PolicyVersion], drawn: random.Random) -> PolicyVersion:
    """Write version 1 in a damaged form, which no server may load."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file, digest = folder / "model.safetensors", good[0].digest
    data = bytearray(weights.weights_file(Path(good[0].path)).read_bytes())
    match kind:
        case "flipped":
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        case "torn":
            del data[drawn.randrange(len(data)) :]
        case "longer":
            data += drawn.randbytes(drawn.randint(1, 4096))
        case "another file":
            data = bytearray(weights.weights_file(Path(good[1].path)).read_bytes())
        case "another hash":
            digest = good[1].digest
    file.write_bytes(data)
    if kind in ("not finite", "too few"):
        tensors = _arrays(SMALL, 1)
        name = drawn.choice(sorted(tensors))
        if kind == "too few":
            del tensors[name]
        else:
            flat = tensors[name].reshape(-1)
            flat[drawn.randrange(len(flat))] = drawn.choice((np.nan, np.inf, -np.inf))
        weights.publish(folder, 1, tensors)
        shutil.move(folder / "v000001" / file.name, file)
        digest = weights_digest(file)
    elif kind == "no file":
        file.unlink()
    return PolicyVersion(version=1, path=str(folder), digest=digest)


if __name__ == "__main__":
    main()
