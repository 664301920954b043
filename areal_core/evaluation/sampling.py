"""Completions of a benchmark's problems from generation servers, judged and recorded.

    problems --> workers of every server --POST /inference/v1/generate--> completions --> verifier --> records

Servers may come, go and come again; a problem whose server is lost goes to another one. What a problem's completions
are sampled with follows from its text alone, not from when, where or beside what they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_core.api.wire import parse_generation
from areal_core.environments.environment import Verdict, Verifier, judge
from areal_core.errors import GenerationError, ServerLostError
from areal_core.evaluation.records import Record, RecordFile, Sample
from areal_core.generation.client import GenerationClient
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Completion, GenerationRequest, Outcome, Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How every problem is sampled."""

    samples: int  # beside its greedy completion
    temperature: float
    max_tokens: int  # of a completion
    seed: int
    stop_token_ids: tuple[int, ...]


class Collector:
    """The problems of one benchmark on their way to records. One event loop calls it."""

    def __init__(
        self,
        problems: Sequence[Prompt],
        records: RecordFile,
        sampling: Sampling,
        tokenizer: Tokenizer,
        verify: Verifier,
        *,
        on_record: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`on_record` is told how many problems are recorded."""
        self._records = records
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._verify = verify
        self._on_record = on_record
        self._waiting = deque(problem for problem in problems if problem.index not in records)
        self._left = len(self._waiting)
        self._workers: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_record(len(records.records))

    def serve(self, client: GenerationClient, completions: int) -> None:
        """Have a server work on problems until none is left, or it is lost; about `completions` at once."""
        for _ in range(max(1, completions // (1 + self._sampling.samples))):
            worker = asyncio.create_task(self._work(client))
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)

    async def finished(self) -> None:
        """Wait until every problem is recorded. Raises the first failure that is not the loss of a server."""
        try:
            if self._left:
                await self._ended
        finally:
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self, client: GenerationClient) -> None:
        while self._waiting:
            problem = self._waiting.popleft()
            try:
                record = await self._record(client, problem)
            except ServerLostError:
                self._waiting.appendleft(problem)
                return
            self._records.add(record)
            self._left -= 1
            self._on_record(len(self._records.records))
        if not self._left and not self._ended.done():
            self._ended.set_result(None)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (error := worker.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _record(self, client: GenerationClient, problem: Prompt) -> Record:
        greedy, sampled = await asyncio.gather(
            self._generate(client, problem, greedy=True), self._sampled(client, problem)
        )
        judged = await asyncio.to_thread(lambda: [self._sample(problem, completion) for completion in greedy + sampled])
        return Record(
            problem=problem.index,
            prompt_id=problem.prompt_id,
            prompt=self._tokenizer.decode(problem.token_ids, special=True),
            gold=problem.answer,
            greedy=judged[0],
            samples=tuple(judged[1:]),
        )

    async def _sampled(self, client: GenerationClient, problem: Prompt) -> list[Completion]:
        return await self._generate(client, problem, greedy=False) if self._sampling.samples else []

    async def _generate(self, client: GenerationClient, problem: Prompt, *, greedy: bool) -> list[Completion]:
        digest = hashlib.sha256(f"{self._sampling.seed}/{problem.prompt_id}".encode()).digest()
        n = 1 if greedy else self._sampling.samples
        request = GenerationRequest(
            request_id=f"evaluation-{problem.index}-{'greedy' if greedy else 'sampled'}",
            token_ids=problem.token_ids,
            n=n,
            max_tokens=self._sampling.max_tokens,
            seed=int.from_bytes(digest[:4]),
            stop_token_ids=self._sampling.stop_token_ids,
            greedy=greedy,
            temperature=self._sampling.temperature,
        )
        completions = parse_generation(await client.generate(request))
        if len(completions) != n or any(completion.finish_reason == "abort" for completion in completions):
            raise GenerationError(f"{client.url}: {request.request_id} came back without its {n} whole completions")
        return completions

    def _sample(self, problem: Prompt, completion: Completion) -> Sample:
        try:
            verdict = judge(self._verify, self._tokenizer, problem, completion)
        except Exception as error:  # noqa: BLE001 - whatever a verifier may do costs one verdict
            logger.warning("problem %d: the verifier failed: %s: %s", problem.index, type(error).__name__, error)
            verdict = Verdict.of(Outcome.FAILED)
        return Sample(
            text=self._tokenizer.decode(completion.token_ids.tolist()),
            tokens=len(completion.token_ids),
            truncated=completion.finish_reason == "length",
            outcome=verdict.outcome,
            score=verdict.score,
            answer=verdict.answer,
        )
