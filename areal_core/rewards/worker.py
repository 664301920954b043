"""The reward service: decodes, verifies, scores and packs the answers of a group, in processes of its own.

A verifier may hang or take its process down. Each worker holds one job at a time, so that either costs one job: the
worker is killed, another takes its place, and the caller gets a RewardError, which says nothing about the answers.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.api.scored_groups import pack_group
from areal_core.api.wire import SampledAnswer, join_answers, version_spans
from areal_core.config.schema import AlgorithmConfig, TaskConfig
from areal_core.environments.verifiers import verifier
from areal_core.errors import ArealError, RewardError
from areal_core.models.tokenizer import Tokenizer
from areal_core.tracking.timeline import TimelineWriter
from areal_core.types import GroupPayload, GroupSummary, Int32Array

_SAMPLES = 2  # answers of a group that are kept as text
_START_TIMEOUT_S = 120.0  # a worker imports numpy and tokenizers, on a machine that may be busy
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob:
    """The answers of one group and all that it takes to score them."""

    answers: tuple[SampledAnswer, ...]  # G, as servers gave them
    prompt_token_ids: tuple[int, ...]
    gold: str
    task: TaskConfig
    algorithm: AlgorithmConfig
    model_path: str  # folder that holds the tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    payload: bytes  # packing.pack_group
    summary: GroupSummary


def score_group(job: ScoreJob) -> ScoredGroup:
    """Score a group. A truncated answer is flagged and wrong, whatever it says; whether it is masked in the loss too
    (algorithm.truncated) is the trainer's business.

    Raises GenerationError for a body that is not an answer and RewardError for answers that can't be scored.
    """
    choices = join_answers(job.answers)
    for index, choice in enumerate(choices):
        if choice.finish_reason not in ("stop", "length") or len(choice.token_ids) == 0:
            raise RewardError(f"answer {index} is not finished: {choice.finish_reason}, {len(choice.token_ids)} tokens")
    verify, tokenizer = verifier(job.task), _tokenizer(job.model_path)
    texts = [tokenizer.decode(choice.token_ids.tolist()) for choice in choices]
    truncated = [choice.finish_reason == "length" for choice in choices]
    correct = [not cut and verify(text, job.gold) for text, cut in zip(texts, truncated, strict=True)]
    rewards = np.where(correct, job.algorithm.reward_correct, job.algorithm.reward_wrong).astype(np.float32)
    versions = np.concatenate([choice.versions for choice in choices]).astype(np.int32)
    payload = GroupPayload(
        prompt_tokens=np.array(job.prompt_token_ids, np.int32),
        lengths=np.array([len(choice.token_ids) for choice in choices], np.int32),
        tokens=np.concatenate([choice.token_ids for choice in choices]).astype(np.int32),
        logprobs=np.concatenate([choice.logprobs for choice in choices]).astype(np.float32),
        versions=versions,
        rewards=rewards,
        truncated=np.array(truncated, np.bool_),
    )
    summary = GroupSummary(
        prompt_tokens=len(job.prompt_token_ids),
        lengths=tuple(len(choice.token_ids) for choice in choices),
        rewards=tuple(rewards.tolist()),
        tokens=len(versions),
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        correct=sum(correct),
        truncated=sum(truncated),
        samples=tuple(
            (text, reward, _spans(choice.versions))
            for text, reward, choice in zip(texts[:_SAMPLES], rewards.tolist(), choices, strict=False)
        ),
    )
    return ScoredGroup(payload=pack_group(payload), summary=summary)


class RewardPool:
    """Processes that score groups. Make and close it in the thread that runs the event loop and outlives the pool: the
    workers die with the thread that spawned them."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        *,
        function: Callable[[ScoreJob], ScoredGroup] = score_group,
        timeline: Callable[[int], Path] | None = None,
    ) -> None:
        """`timeline`: the file for what a worker does, by its place."""
        self._timeout_s = timeout_s
        self._function = function
        self._timeline = timeline
        self._workers = {self._started(place) for place in range(workers)}
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._closed = False

    async def score(self, job: ScoreJob) -> ScoredGroup:
        """Score a group in the next free worker. Raises RewardError when the verifier fails, takes longer than the
        timeout (waiting for a worker does not count) or loses its process."""
        worker = await self._idle.get()
        if not worker.process.is_alive():
            worker = self._replace(worker)
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, worker.ask, job, self._timeout_s)
        except BaseException:  # it hangs, it is dead, or nobody waits for its answer any more
            worker = self._replace(worker)
            raise
        finally:
            self._idle.put_nowait(worker)
        if isinstance(result, ArealError):
            raise result
        return result

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    async def close(self) -> None:
        """Kill the workers; jobs under way or waiting end with a RewardError."""
        self._closed = True
        for worker in self._workers:
            worker.kill()

    def _replace(self, worker: _Worker) -> _Worker:
        worker.kill()
        if self._closed:
            return worker
        self._workers.remove(worker)
        self._workers.add(fresh := self._started(worker.place))
        return fresh

    def _started(self, place: int) -> _Worker:
        return _Worker(self._function, place, None if self._timeline is None else self._timeline(place))


class _Worker:
    """A process and the parent's end of the pipe to it."""

    def __init__(self, function: Callable[[ScoreJob], ScoredGroup], place: int, timeline: Path | None) -> None:
        self.place = place
        self._pipe, theirs = _spawn.Pipe()
        self._started = False
        self._cpu_s = 0.0  # that the process has used, as it says
        self._file = timeline
        self._timeline: TimelineWriter | None = None
        self.process = _spawn.Process(target=_serve, args=(theirs, function), name="reward", daemon=True)
        self.process.start()
        theirs.close()  # so that the process' death reads as end-of-file

    def ask(self, job: ScoreJob, timeout_s: float) -> ScoredGroup | ArealError:
        """Blocks until the answer is there. Raises RewardError when it does not come."""
        try:
            if not self._started:
                self._receive(_START_TIMEOUT_S, "did not start")
                self._started = True
                self._timeline = None if self._file is None else TimelineWriter(self._file, cpu=lambda: self._cpu_s)
            start = time.monotonic()
            self._pipe.send(job)
            result = self._receive(timeout_s, "did not answer; rollout.reward_timeout_s is its limit")
            if self._timeline is not None:
                self._timeline.span("score", start, time.monotonic())
            return result
        except (EOFError, OSError) as error:
            raise RewardError("the reward worker died while it scored this group") from error

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def _receive(self, timeout_s: float, what: str) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RewardError(f"the reward worker {what} (waited {timeout_s:g} s)")
        result, self._cpu_s = self._pipe.recv()
        return result


def _serve(pipe: Connection, function: Callable[[ScoreJob], ScoredGroup]) -> None:
    """The worker process: one job after the other until the pool is gone. With every answer go the CPU seconds that it
    has used so far; the first one says that it is ready."""
    from areal_core.launch.process import die_with_parent

    die_with_parent()
    pipe.send((None, time.process_time()))
    while True:
        try:
            job: ScoreJob = pipe.recv()
        except EOFError:
            return
        result = _attempt(function, job)
        pipe.send((result, time.process_time()))


def _attempt(function: Callable[[ScoreJob], ScoredGroup], job: ScoreJob) -> ScoredGroup | ArealError:
    try:
        return function(job)
    except ArealError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the boundary: whatever a verifier does costs one group, not the worker
        return RewardError(f"the verifier failed: {type(error).__name__}: {error}")


@functools.lru_cache(maxsize=2)
def _tokenizer(model_path: str) -> Tokenizer:
    return Tokenizer.from_folder(model_path)


def _spans(versions: Int32Array) -> str:
    """Per-token versions for people: "3:0-40 4:40-77"."""
    return " ".join(f"{version}:{start}-{end}" for version, start, end in version_spans(versions))
