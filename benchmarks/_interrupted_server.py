"""Generation under updates without a trainer, for `benchmarks.interruption`.

One embedded server on one core always has work and gets new model weights at a fixed interval. It completes prompts of
the long-tail task, each with the length of the worked solution. A pool of one server loads another version every
`period_s`, with each kind of interruption in turn. Tokens come from the server's own counter.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetensors.numpy import load_file

from areal_core.api.pending_completions import PendingCompletions
from areal_core.config.schema import RunConfig
from areal_core.controller.pool import GenerationPool
from areal_core.environments.arithmetic import training_chain
from areal_core.models.tokenizer import char_tokenizer
from areal_core.run.folders import base_model
from areal_core.storage import weights
from areal_core.types import GenerationRequest, PolicyVersion
from benchmarks._harness import in_turns
from benchmarks.generation import Child

SLOTS = 64
_LEAD_IN_S = 1.0


def measure(
    config: RunConfig, arms: Sequence[str], *, rounds: int, seconds: float, period_s: float, log: Callable[[str], None]
) -> dict[str, list[float]]:
    """Generated tokens per second of every arm in every round. The first arm changes from round to round."""
    cores = sorted(os.sched_getaffinity(0))
    base = base_model(config, log)
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory(prefix="areal-interruption-") as folder:
        scratch = Path(folder)
        child = Child(_command(config, base, scratch), cores[-1], stdout=sys.stderr)
        try:
            url = child.wait_for(scratch / "ready.json")
            os.sched_setaffinity(0, set(cores[:-1]))
            versions = _Versions(base, scratch)
            for number in range(rounds):
                for arm in in_turns(arms, number):
                    speed = asyncio.run(_window(url, config, arm, versions, seconds, period_s))
                    speeds[arm].append(speed)
                    log(f"server, round {number + 1} of {rounds}: {arm}: {speed:.0f} tokens/s")
        finally:
            child.end()
            os.sched_setaffinity(0, set(cores))
    return speeds


class _Versions:
    """Ascending version numbers of two sets of model weights in turn."""

    def __init__(self, base: Path, scratch: Path) -> None:
        arrays = load_file(base / "model.safetensors")
        self._made = [
            weights.publish(scratch, place, {name: array * array.dtype.type(factor) for name, array in arrays.items()})
            for place, factor in ((0, 1.0), (1, 1.001))
        ]
        self._numbers = itertools.count(1)

    def next(self) -> PolicyVersion:
        number = next(self._numbers)
        made = self._made[number % 2]
        return PolicyVersion(version=number, path=made.path, digest=made.digest)


def _command(config: RunConfig, base: Path, scratch: Path) -> list[str]:
    options = ["--model", base, "--slots", SLOTS, "--ready-file", scratch / "ready.json"]
    return [sys.executable, "-m", "areal_core.generation.server.routes", *map(str, options)]


async def _window(url: str, config: RunConfig, arm: str, versions: _Versions, seconds: float, period_s: float) -> float:
    pool = GenerationPool(completions_per_server=2 * SLOTS, interruption=arm)
    await pool.join("server", url, versions.next)
    group = config.algorithm.group_size
    requests = _requests(config)
    tasks = [asyncio.ensure_future(_ask(pool, requests)) for _ in range(2 * SLOTS // group)]
    tasks.append(asyncio.ensure_future(_update(pool, versions, period_s)))
    try:
        await _run(tasks, _LEAD_IN_S)
        [before], start = await pool.loads(), time.monotonic()
        await _run(tasks, seconds)
        [after], end = await pool.loads(), time.monotonic()
        return (after.generated_tokens - before.generated_tokens) / (end - start)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.abort_all()
        await pool.close()


def _requests(config: RunConfig) -> Iterator[GenerationRequest]:
    """Groups of training prompts, the same in every window."""
    task, tokenizer = config.task, char_tokenizer()
    for number in itertools.count():
        chain = training_chain(config.seed, number, task.max_operations, task.length_decay)
        yield GenerationRequest(
            request_id=f"r{number}",
            token_ids=tokenizer.encode(chain.prompt),
            n=config.algorithm.group_size,
            max_tokens=len(chain.worked) + 1,
            seed=number,
            stop_token_ids=(),
        )


async def _run(tasks: list[asyncio.Future[None]], seconds: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _ask(pool: GenerationPool, requests: Iterator[GenerationRequest]) -> None:
    while True:
        await pool.generate(PendingCompletions(next(requests)))


async def _update(pool: GenerationPool, versions: _Versions, period_s: float) -> None:
    while True:
        _, _ = await asyncio.gather(pool.load_version(versions.next()), asyncio.sleep(period_s))
