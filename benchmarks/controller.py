"""What is the capacity of one controller? Trajectories of 8k tokens, in groups of 16, with its real parts.

    python -m benchmarks.controller [--steps 1000] [--parts process,http,remote,update,ranks]

Each part is a process of its own on one core. Servers, reward workers and ranks are other processes, on other cores if
there are any. Ledger and payloads are on disk, and synced as in a run.

- process: rollout core, ledger and payloads; stand-in servers and reward workers return prepared results at once. It
  makes `--steps` steps of 512 trajectories, with a version each and a checkpoint every tenth, which frees payloads.
  `trajectories_per_s`; `peak_mb`, the peak memory of the process; `memory_mb` after a tenth of the steps and at the
  end.
- http: the pool over HTTP, with a server that returns encoded responses at once, and real reward workers.
  `http_trajectories_per_cpu_s` is per second of the controller's own CPU time; `worker_trajectories_per_cpu_s` is the
  rate of the reward workers.
- remote: the same with a reward worker that requests work from the controller, as on other machines:
  `remote_trajectories_per_cpu_s`, `remote_worker_trajectories_per_cpu_s`.
- update: 8,192 completions run at 8 servers, each half sampled, when a version is published. They are handed back
  (`interruption=resubmit`), and the rest of each is requested. `update_8192_s` is the time from publication until all
  run again. `worst_loop_stall_ms` is the longest delay of a timer in the controller's event loop in that time.
  `full_collection_ms`: a full garbage collection then, which the controller runs once in minutes.
- ranks: 512 ranks request a batch of 8,192 trajectories at once. `batch_512_ranks_s` is the controller's CPU time from
  the first request to the last response.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from aiohttp import ClientSession, TCPConnector, web

from areal_core.api.access import authorization
from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.api.refusals import token_middleware
from areal_core.api.scored_groups import ScoredGroup, pack_group
from areal_core.api.wire import Arrival
from areal_core.config.schema import RunConfig, load
from areal_core.controller.core.controller import Engine, Rewards, RolloutController
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.payloads import PayloadStore
from areal_core.controller.pool import GenerationPool
from areal_core.controller.recorder import Recorder
from areal_core.controller.routes import Routes, reward_routes
from areal_core.controller.service import collect_rarely
from areal_core.models.tokenizer import char_tokenizer
from areal_core.models.verified import weights_digest
from areal_core.rewards.group import Requests
from areal_core.rewards.pool import RewardPool
from areal_core.rewards.remote import ANSWER_BYTES
from areal_core.rewards.worker import Groups
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.tracking.outbox import Outbox
from areal_core.types import GroupState, GroupSummary, Outcome, PolicyVersion, Prompt
from benchmarks import _answering_servers, _harness
from tests.support.models import write_tiny
from tests.support.records import group_payload, packed

GROUP, TOKENS = 16, 8192
BATCH = 512  # trajectories
PROMPT = char_tokenizer().encode("1=")
CHECKPOINT_EVERY = 10  # steps
UPDATED, SERVERS, RANKS = 8192, 8, 512
HTTP_BATCHES = 6
PARTS = ["process", "http", "remote", "update", "ranks"]
_CORES = os.sched_getaffinity(0)
_BEAT_S = 0.002
_TOKEN = "t"


@dataclass
class Run:
    """The parts of a controller's process."""

    config: RunConfig
    folder: Path
    ledger: TrajectoryLedger
    payloads: PayloadStore
    controller: RolloutController

    async def trained(self, steps: Sequence[int], each: Callable[[int], None] = lambda _: None) -> None:
        """Take batches, publish a version for each, and free data that a checkpoint makes obsolete."""
        for step in steps:
            assert await self.controller.batch(step, timeout_s=3600) is not None
            self.controller.publish(_version(step))
            if step % CHECKPOINT_EVERY == 0:
                while self.ledger.free(step) or self.ledger.prune():
                    await asyncio.to_thread(self.ledger.flush)
                await self.payloads.keep(self.ledger.payloads.segments())
            each(step)


@asynccontextmanager
async def running(config: RunConfig, engine: Engine, rewards: Rewards) -> AsyncIterator[Run]:
    with tempfile.TemporaryDirectory(prefix="areal-controller-") as scratch:
        folder = Path(scratch)
        ledger = TrajectoryLedger(folder / "ledger.sqlite", group_size=GROUP)
        ledger.publish(_version(0))
        payloads = PayloadStore(folder / "payloads", 1)
        controller = RolloutController(
            config=config,
            source=_Prompts(),
            engine=engine,
            rewards=rewards,
            payloads=payloads,
            ledger=ledger,
            stop_token_ids={"": (_answering_servers.END,)},
            opens_with_prompt={"": True},
        )
        collecting = asyncio.ensure_future(collect_rarely())
        task = asyncio.ensure_future(controller.run())
        try:
            yield Run(config, folder, ledger, payloads, controller)
            controller.finish("measured")
            await task
        finally:
            task.cancel()
            collecting.cancel()
            payloads.close()
            ledger.close()


def configured(*, steps: int, batch: int, eta: int, slots: int = 64, servers: int = 1) -> RunConfig:
    return load(
        {
            "algorithm": {"group_size": GROUP},
            "rollout": {"batch_size": batch, "max_staleness": eta, "request_timeout_s": 3600.0},
            "training": {"steps": steps, "microbatch_tokens": 2 * TOKENS},
            "task": {"max_prompt_tokens": 8, "max_new_tokens": TOKENS},
            "model": {"context": 2 * TOKENS},
            "generation": {"slots": slots, "servers": servers, "interruption": "resubmit"},
        }
    )


class _Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, prompt_id=f"{index:x}", text="1=", token_ids=PROMPT, answer="1")


def _version(number: int) -> PolicyVersion:
    return PolicyVersion(version=number, path="", digest=f"{number}")


# -- in process ------------------------------------------------------------------------------------------------


class _Servers:
    """Stand-in servers that complete every request at once, with a realistic number in flight."""

    def __init__(self) -> None:
        self.version = 0
        self.freed: Callable[[], None] = lambda: None
        self._received = receive(_answering_servers.body(TOKENS, ended=True))
        self._running = 0

    @property
    def room(self) -> int:
        return 1024 - self._running

    async def generate(self, pending: PendingCompletions) -> None:
        pending.sent = True
        self._running += GROUP
        for index in range(GROUP):
            await asyncio.sleep(0)  # they end one by one
            pending.take([index], self._received)
            self._running -= 1
        self.freed()

    async def load_version(self, version: PolicyVersion) -> None:
        self.version = version.version

    async def abort_all(self) -> None: ...


class _Rewards:
    """Stand-in reward workers: score a group when its last completion arrives.
    `version` is the policy version reported for the samples."""

    def __init__(self, version: Callable[[], int] = lambda: 0) -> None:
        self._scored, self._version = scored_group(), version

    def begin(self, prompt: Prompt, n: int, *, apart: bool) -> _Session:
        version = self._version()
        summary = replace(self._scored.summary, min_version=version, max_version=version)
        return _Session(replace(self._scored, summary=summary))


class _Session:
    def __init__(self, scored: ScoredGroup) -> None:
        self._missing = GROUP
        self._scored = scored
        self._complete = asyncio.Event()

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        self._missing -= len(arrivals)
        if not self._missing:
            self._complete.set()

    async def next_outcome(self) -> Requests | ScoredGroup:
        await self._complete.wait()
        return self._scored

    def close(self) -> None: ...


def scored_group() -> ScoredGroup:
    tokens, right = GROUP * TOKENS, GROUP // 2
    payload, checksums = pack_group(
        group_payload(
            np.array(PROMPT, np.int32),
            np.full(GROUP, TOKENS, np.int32),
            tokens=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -1, np.float32),
        )
    )
    summary = GroupSummary(
        **packed((TOKENS,) * GROUP, len(PROMPT), checksums=checksums),
        min_version=0,
        max_version=0,
        outcomes={Outcome.CORRECT: right, Outcome.INCORRECT: GROUP - right},
    )
    return ScoredGroup(payload=payload, summary=summary)


async def in_process(steps: int) -> dict[str, Any]:
    memory: dict[int, float] = {}

    def note(step: int) -> None:
        if step in (max(1, steps // 10), steps):
            memory[step] = round(psutil.Process().memory_info().rss / 2**20, 1)

    servers = _Servers()
    async with running(configured(steps=steps, batch=BATCH, eta=2), servers, _Rewards(lambda: servers.version)) as run:
        servers.freed = run.controller.freed.notify
        start = time.perf_counter()
        await run.trained(range(1, steps + 1), note)
        wall_s = time.perf_counter() - start
    return {
        "trajectories_per_s": round(steps * BATCH / wall_s),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "memory_mb": memory,
    }


# -- over HTTP -------------------------------------------------------------------------------------------------


@contextmanager
def answering(*, servers: int, hold: bool) -> Iterator[tuple[list[str], Callable[[], int]]]:
    """Context manager for servers in a process of their own: their URLs, and a counter of running completions."""
    command = [sys.executable, "-m", "benchmarks._answering_servers", "--servers", str(servers), "--tokens"]
    process = subprocess.Popen(
        [*command, str(TOKENS), *(["--hold"] if hold else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, told = process.stdin, process.stdout

    def running_completions() -> int:
        asked.write(b"\n")
        asked.flush()
        return int(told.readline())

    _elsewhere(process.pid)
    try:
        yield json.loads(told.readline()), running_completions
    finally:
        asked.close()
        process.wait()


@asynccontextmanager
async def pooled(config: RunConfig, urls: Sequence[str], rewards: Rewards) -> AsyncIterator[tuple[Run, GenerationPool]]:
    """A controller whose engine is a pool of servers."""
    pool = GenerationPool(
        completions_per_server=config.completions_per_server, interruption=config.interruption, patience_s=600
    )
    try:
        async with running(config, pool, rewards) as run:
            pool.freed = run.controller.freed.notify
            pool.registry.subscribe(lambda *_: run.controller.notify())
            for index, url in enumerate(urls):
                await pool.join(f"generation-{index}", url, lambda: _version(0))
            yield run, pool
    finally:
        await pool.close()


async def over_http(batches: int, *, remote: bool = False) -> dict[str, Any]:
    config = configured(steps=batches, batch=BATCH, eta=batches)
    with answering(servers=1, hold=False) as (urls, _), tempfile.TemporaryDirectory() as scratch:
        model = write_tiny(Path(scratch) / "model")
        workers = RewardPool(0 if remote else 1, 600.0, function=Groups(config, str(model)))
        async with _host(workers, config, model) if remote else nullcontext(workers.pids()) as pids:
            for pid in pids:
                _elsewhere(pid)
            try:
                async with pooled(config, urls, workers) as (run, _):
                    await run.controller.batch(1, timeout_s=3600)  # all has begun
                    own, theirs = time.process_time(), _cpu_s(pids)
                    for step in range(2, batches + 1):
                        await run.controller.batch(step, timeout_s=3600)
                    own, theirs = time.process_time() - own, _cpu_s(pids) - theirs
            finally:
                await workers.close()
    rates = [round((batches - 1) * BATCH / cpu_s) for cpu_s in (own, theirs)]
    names = ("remote", "remote_worker") if remote else ("http", "worker")
    return {f"{name}_trajectories_per_cpu_s": rate for name, rate in zip(names, rates, strict=True)}


@asynccontextmanager
async def _host(workers: RewardPool, config: RunConfig, model: Path) -> AsyncIterator[list[int]]:
    """Processes of a remote host with one reward worker that connects to this controller."""
    info = RunInfo(run_id="r", model_path=str(model), checkpoint_url="")
    run = RunDir.create(replace(config, state_dir=str(model.parent)), info)
    app = web.Application(client_max_size=ANSWER_BYTES, middlewares=[token_middleware(run.token())])
    app.add_routes(reward_routes(workers))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    write_json(run.ready_file("controller"), {"pid": os.getpid(), "url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    options = ("--run-dir", str(run.root), "--first", "0", "--workers", "1")
    host = await asyncio.create_subprocess_exec(sys.executable, "-m", "areal_core.rewards.host", *options)
    try:
        await _until(run.ready_file("rewards").exists)
        yield [host.pid, *(child.pid for child in psutil.Process(host.pid).children(recursive=True))]
    finally:
        host.kill()
        await host.wait()
        await runner.cleanup()


async def update(completions: int) -> dict[str, Any]:
    config = configured(steps=2, batch=completions, eta=0, slots=completions // SERVERS, servers=SERVERS)
    with answering(servers=SERVERS, hold=True) as (urls, count), tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny(Path(scratch) / "version")
        version = PolicyVersion(version=1, path=str(folder), digest=weights_digest(folder))
        async with pooled(config, urls, _Rewards()) as (run, pool):
            await _until(lambda: count() >= completions)
            beats: list[float] = []
            beating = asyncio.ensure_future(_beat(beats))
            start, own = time.perf_counter(), time.process_time()
            run.controller.publish(version)
            await _until(lambda: pool.version == 1 and count() >= completions)
            wall_s, own = time.perf_counter() - start, time.process_time() - own
            beating.cancel()
            start = time.perf_counter()
            gc.collect()
            found = {
                "full_collection_ms": round(1000 * (time.perf_counter() - start)),
                "update_8192_s": round(wall_s, 2),
                "update_8192_cpu_s": round(own, 2),
                "worst_loop_stall_ms": round(1000 * max(beats), 1),
                "update_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            }
    return found


async def _until(condition: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - another process makes it true
        await asyncio.sleep(0.1)


async def _beat(beats: list[float]) -> None:
    """Record how late a timer fires."""
    while True:
        due = time.perf_counter() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        beats.append(time.perf_counter() - due)


# -- ranks -----------------------------------------------------------------------------------------------------


async def to_ranks(completions: int, ranks: int) -> dict[str, Any]:
    servers = _Servers()
    async with running(configured(steps=1, batch=completions, eta=0), servers, _Rewards()) as run:
        servers.freed = run.controller.freed.notify
        async with asyncio.timeout(3600):
            while run.ledger.counts()[GroupState.READY] * GROUP < completions:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        service = SimpleNamespace(
            config=run.config,
            controller=run.controller,
            ledger=run.ledger,
            recorder=Recorder(run.config, run.ledger, Outbox(run.folder / "outbox.sqlite", "r")),
            published=_nothing,
            record_texts=_nothing,
            run_dir=SimpleNamespace(token=lambda: _TOKEN),
            servers=GenerationPool(completions_per_server=1),
            rewards=RewardPool(0, 1.0, function=len),
        )
        runner = web.AppRunner(Routes(service).app(), access_log=None)  # pyright: ignore[reportArgumentType]
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/batch/1"
        own = time.process_time()
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.controller", "--ask", url, "--ranks", str(ranks)),
            stdout=asyncio.subprocess.PIPE,
        )
        _elsewhere(asking.pid)
        out, _ = await asking.communicate()
        own = time.process_time() - own
        await runner.cleanup()
    told = json.loads(out)
    assert told["ranks"] == ranks
    return {"batch_512_ranks_s": round(own, 2), "batch_512_ranks_wall_s": told["wall_s"], "batch_mb": told["mb"]}


async def _nothing(_: object) -> None: ...


async def ask(url: str, ranks: int) -> None:
    """The ranks: request the batch all at once, and read all responses."""
    async with ClientSession(headers=authorization(_TOKEN), connector=TCPConnector(limit=0)) as session:

        async def rank() -> int:
            async with session.get(url, params={"timeout_s": "60"}) as response:
                assert response.status == 200, await response.text()
                return len(await response.read())

        start = time.perf_counter()
        sizes = await asyncio.gather(*(rank() for _ in range(ranks)))
    wall_s = time.perf_counter() - start
    print(json.dumps({"ranks": len(sizes), "mb": round(max(sizes) / 1e6, 3), "wall_s": round(wall_s, 2)}))


# -- all -------------------------------------------------------------------------------------------------------


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _elsewhere(pid: int) -> None:
    """Run a process on the cores that this one does not use."""
    others = _CORES - os.sched_getaffinity(0)
    os.sched_setaffinity(pid, others or _CORES)


def _measured(part: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Run a part in a process of its own on one core."""
    os.sched_setaffinity(0, {min(_CORES)})
    return asyncio.run(part())  # pyright: ignore[reportArgumentType]


def controller(names: Sequence[str], steps: int) -> dict[str, Any]:
    parts = {
        "process": functools.partial(in_process, steps),
        "http": functools.partial(over_http, HTTP_BATCHES),
        "remote": functools.partial(over_http, HTTP_BATCHES, remote=True),
        "update": functools.partial(update, UPDATED),
        "ranks": functools.partial(to_ranks, UPDATED, RANKS),
    }
    found: dict[str, Any] = {}
    for name in names:
        with _harness.processes(1) as processes:
            found |= processes.submit(_measured, parts[name]).result()
        _harness.tell(f"part {name}: {found}")
    return found


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--steps", type=_harness.positive, default=1000)
    parser.add_argument("--parts", type=_harness.some_of(PARTS), default=PARTS)
    parser.add_argument("--ask", metavar="URL", help="act as the ranks of the part ranks (internal)")
    parser.add_argument("--ranks", type=_harness.positive, default=RANKS)
    arguments = parser.parse_args()
    if arguments.ask:
        asyncio.run(ask(arguments.ask, arguments.ranks))
    else:
        _harness.report(lambda: controller(arguments.parts, arguments.steps))


if __name__ == "__main__":
    main()
