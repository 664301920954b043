"""Benchmarks, and recorded rollouts of their problems with an environment and generation servers.

    problems --> workers at every server --rollouts: requests, completions, environment--> records

Servers may join, leave and join again. A problem whose server is lost goes to another server. The seed of a problem's
rollouts follows from its text alone, not from time, server or batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.api.rollouts import Rollouts, Session
from areal_core.api.wire import encode_generation
from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import prompts_digest
from areal_core.environments.registry import environment_class
from areal_core.environments.source import open_source
from areal_core.environments.verdicts import Failures
from areal_core.errors import GenerationError, RewardError, ServerLostError, SessionLostError
from areal_core.evaluation.scores import Record, RecordFile
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Completion, GenerationRequest, Outcome, Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark for one model; `config` has the sampling settings."""

    name: str
    config: RunConfig
    problems: list[Prompt]
    about: dict[str, Any]  # model, task and sampling settings; records with other ones are another evaluation's


def open_benchmark(
    name: str, config: RunConfig, tokenizer: Tokenizer, weights: str, *, engine: str, prompts: int | None = None
) -> Benchmark:
    """The held-out set of a task, or its first `prompts` training prompts, for a model with digest `weights` that
    `engine` serves. Raises the errors of `open_source`."""
    prompt_source = open_source(config, tokenizer)
    problems = prompt_source.held_out() if prompts is None else [prompt_source.prompt(each) for each in range(prompts)]
    source = config.task.held_out_path or f"{config.task.name} {config.task.dataset or ''}".strip()
    described = {"name": name, "problems": len(problems), "sha256": prompts_digest(problems), "source": source}
    about = {
        "benchmark": described,
        "model": {"digest": weights},
        "task": {"max_new_tokens": config.task.max_new_tokens, "chat": dataclasses.asdict(config.task.chat)},
        "environment": {"name": config.environment.name, "verifier": config.environment.verifier},
        "generation": {"engine": engine},
        "evaluation": {"samples": config.evaluation.samples, "temperature": config.evaluation.temperature},
        "seed": config.seed,
    }
    return Benchmark(name=name, config=config, problems=problems, about=about)


class Rewards(Protocol):
    """The reward workers, which run environments."""

    def begin(self, prompt: Prompt, n: int, *, apart: bool, shown: bool) -> Session: ...


class Server(Protocol):
    """A source of completions: the client of a generation server, or an engine."""

    url: str  # name in messages

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        """The completions of a request. Raises ServerLostError, and GenerationError for a rejected request."""
        ...


_FAILED = Sample(text="", tokens=0, truncated=False, outcome=Outcome.FAILED, score=None, answer=None)


class Collector:
    """Samples the problems of one benchmark and records them, in one event loop."""

    def __init__(
        self,
        benchmark: Benchmark,
        records: RecordFile,
        tokenizer: Tokenizer,
        rewards: Rewards,
        *,
        stop_token_ids: Mapping[str, tuple[int, ...]],
        version: int = 0,
        on_record: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`stop_token_ids` is by task. All tokens must come from policy `version`.
        `on_record` is called with the number of recorded problems."""
        self._config, self._samples = benchmark.config, benchmark.config.evaluation.samples or 0
        self._records, self._on_record = records, on_record
        self._tokenizer, self._stop_token_ids = tokenizer, stop_token_ids
        self._rewards, self._version = rewards, version
        self._by_task = self._config.by_task
        self._failures = {name: Failures(its.environment.max_no_result) for name, its in self._by_task.items()}
        self._opens = {name: environment_class(its).opens_with_prompt for name, its in self._by_task.items()}
        self._waiting: asyncio.Queue[Prompt] = asyncio.Queue()
        for problem in benchmark.problems:
            if problem.index not in records:
                self._waiting.put_nowait(problem)
        self._left = self._waiting.qsize()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count()

    @property
    def over(self) -> bool:
        """Whether every problem is recorded, or one has failed."""
        return self._ended.done()

    async def work(self, server: Server, completions: int) -> None:
        """Let a server work on problems until none is left or one has failed, about `completions` at once.
        Raises ServerLostError if the server is lost; its problems go to other servers."""
        count = max(1, completions // (1 + self._samples))
        workers = [asyncio.create_task(self._work(server)) for _ in range(count)]
        try:
            await asyncio.wait((self._ended, *workers), return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done():
                    worker.result()
        except ServerLostError:
            raise
        except Exception as error:  # noqa: BLE001 - raised by `finished`
            if not self._ended.done():
                self._ended.set_exception(error)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def finished(self) -> None:
        """Wait until every problem is recorded. Raises the first failure that is not the loss of a server."""
        await asyncio.shield(self._ended)

    async def _work(self, server: Server) -> None:
        while True:
            problem = await self._waiting.get()
            try:
                record = await self._record(server, problem)
            except BaseException:
                self._waiting.put_nowait(problem)
                raise
            self._records.add(record)
            self._left -= 1
            self._count()

    def _count(self) -> None:
        self._on_record(len(self._records))
        if not self._left and not self._ended.done():
            self._ended.set_result(None)

    async def _record(self, server: Server, problem: Prompt) -> Record:
        kinds = [True, False] if self._samples else [True]  # greedy: yes or no
        parts = [asyncio.create_task(self._rollouts(server, problem, greedy=greedy)) for greedy in kinds]
        try:
            greedy, *samples = [sample for part in await asyncio.gather(*parts) for sample in part]
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        return Record(
            problem=problem.index,
            prompt_id=problem.prompt_id,
            prompt=self._tokenizer.decode(problem.token_ids, special=True),
            gold=problem.answer,
            task=problem.task,
            greedy=greedy,
            samples=tuple(samples),
        )

    async def _rollouts(self, server: Server, problem: Prompt, *, greedy: bool) -> tuple[Sample, ...]:
        """The rollouts of a problem; those that fail in every try have no result.
        Raises UserCodeError if too many rollouts have no result."""
        digest = hashlib.sha256(f"{self._config.seed}/{problem.prompt_id}".encode()).digest()
        n = 1 if greedy else self._samples
        request = GenerationRequest(
            request_id=f"evaluation-{problem.index}-{'greedy' if greedy else 'sampled'}",
            token_ids=problem.token_ids,
            n=n,
            max_tokens=self._by_task[problem.task].task.max_new_tokens,
            seed=int.from_bytes(digest[:4]),
            stop_token_ids=self._stop_token_ids[problem.task],
            greedy=greedy,
            temperature=self._config.evaluation.temperature,
        )

        async def generate(pending: PendingCompletions) -> None:
            completions = await self._complete(server, pending.request)
            pending.take(range(pending.request.n), receive(encode_generation(pending.request, completions)))

        def begin(apart: bool) -> Session:
            return self._rewards.begin(problem, n, apart=apart, shown=True)

        tries = 0
        async with Rollouts(request, self._opens[problem.task], generate, begin) as rollouts:
            while True:
                try:
                    scored = await rollouts.scored()
                    break
                except SessionLostError:
                    continue
                except RewardError as error:
                    self._failures[problem.task].count_failed_attempt(error)
                    if (tries := tries + 1) >= self._config.rollout.max_tries:
                        self._failures[problem.task].count_group(Counter({Outcome.FAILED: n}), str(error))
                        return (_FAILED,) * n
        assert scored is not None, "a request is finished or raises"
        found = scored.summary
        self._failures[problem.task].count_group(found.outcomes, scored.failure, truncated=sum(found.truncated))
        return scored.samples

    async def _complete(self, server: Server, request: GenerationRequest) -> list[Completion]:
        completions = await server.complete(request)
        if len(completions) != request.n or any(completion.finish_reason == "abort" for completion in completions):
            raise GenerationError(f"{server.url}: {request.request_id} did not return all {request.n} completions")
        if any((completion.versions != self._version).any() for completion in completions):
            raise ServerLostError(f"{server.url}: it has loaded other model weights than version {self._version}")
        return completions
