"""Stand-ins for the parts around the rollout core, in virtual time: an engine, a scorer and a prompt source."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import orjson

from areal_core.api.transcript import Transcript
from areal_core.api.wire import SampledAnswer, join_answers
from areal_core.errors import GenerationError, RewardError
from areal_core.types import GenerationRequest, GroupSummary, PolicyVersion, Prompt

FIRST_TOKEN = 100  # above the prompts' and the stop token


def body(answers: Sequence[tuple[Sequence[int], str]], version: int) -> bytes:
    """A server's answer: tokens and finish reason of every choice, all sampled by `version`."""
    choices = [
        {
            "index": index,
            "finish_reason": finish,
            "token_ids": list(tokens),
            "weight_versions": [{"version": str(version), "start": 0, "end": len(tokens)}] if tokens else [],
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
        }
        for index, (tokens, finish) in enumerate(answers)
    ]
    return orjson.dumps({"choices": choices})


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, prompt_id=f"{index:x}", text=f"{index}=", token_ids=(1, 2, 3), answer="0")


class FakeEngine:
    """Takes a random time for each request and holds versions as real servers do. No two tokens that it samples are
    the same one, so that each can be followed. With `interrupts`, an update ends what runs, to be gone on with."""

    def __init__(self, rng: random.Random, *, capacity: int, fail: float = 0.0, interrupts: bool = False) -> None:
        self.rng, self.capacity, self.fail, self.interrupts = rng, capacity, fail, interrupts
        self.version = 0
        self.versions: list[int] = []  # that sampled token FIRST_TOKEN + i
        self.contexts: dict[int, tuple[int, ...]] = {}  # what stood before the first token of an answer to a request
        self.seeds: dict[str, int] = {}  # by request id
        self.interrupted = 0  # answers that were asked for again
        self._interruption = asyncio.Event()
        self._ending = False

    @property
    def sampled(self) -> int:
        """Tokens that were handed over."""
        return len(self.versions)

    async def generate(self, transcript: Transcript) -> None:
        if not transcript.begun:
            transcript.begin(await self.serve(transcript.request))
        while not self._ending and (unfinished := transcript.unfinished()):
            self.interrupted += 1
            transcript.extend(unfinished[0], await self.serve(transcript.continuation(unfinished[0])))

    async def serve(self, request: GenerationRequest) -> bytes:
        version = self.version
        assert self.seeds.setdefault(request.request_id, request.seed) == request.seed
        assert request.max_tokens > 0
        try:
            async with asyncio.timeout(self.rng.expovariate(1.0)):
                await self._interruption.wait()
        except TimeoutError:
            if self.rng.random() < self.fail:
                raise GenerationError("the server is gone") from None
            answers = [self._sample(version, request, 1, 30, "stop") for _ in range(request.n)]
        else:
            answers = [
                self._sample(version, request, *((1, 5, "stop") if self.rng.random() < 0.3 else (0, 5, "abort")))
                for _ in range(request.n)
            ]
        return body(answers, version)

    async def load_version(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        self.version = version.version
        if self.interrupts and not self._ending:
            self._interruption.set()
            self._interruption = asyncio.Event()

    async def abort_all(self) -> None:
        self._ending = True
        self._interruption.set()
        await asyncio.sleep(0.01)  # a server takes its time to say so, longer than its requests take to end

    def _sample(self, version: int, request: GenerationRequest, low: int, high: int, finish: str) -> tuple[range, str]:
        first = FIRST_TOKEN + len(self.versions)
        tokens = range(first, first + min(self.rng.randint(low, high), request.max_tokens))
        self.versions += [version] * len(tokens)
        if tokens:
            self.contexts[first] = request.token_ids
        return tokens, finish


class FakeScorer:
    """Takes answers that are finished, and keeps them. An answer is right with probability `right`."""

    def __init__(self, rng: random.Random, *, fail: float = 0.0, right: float = 0.0) -> None:
        self.rng, self.fail, self.right = rng, fail, right
        self.uniform_tokens = 0  # of groups that were all right or all wrong
        self.scored: list[tuple[tuple[int, ...], list[int], list[int]]] = []  # prompt, tokens and versions of an answer

    async def score(self, prompt: Prompt, answers: Sequence[SampledAnswer]) -> tuple[GroupSummary, bytes]:
        await asyncio.sleep(self.rng.uniform(0.0, 0.1))
        if self.rng.random() < self.fail:
            raise RewardError("the verifier broke")
        joined = join_answers(answers)
        assert {answer.finish_reason for answer in joined} <= {"stop", "length"}
        versions = [version for answer in joined for version in answer.versions.tolist()]
        # No draw where it would say nothing: it would change what all others draw.
        correct = sum(self.rng.random() < self.right for _ in joined) if self.right else 0
        self.uniform_tokens += len(versions) if correct in (0, len(joined)) else 0
        self.scored += [(prompt.token_ids, answer.token_ids.tolist(), answer.versions.tolist()) for answer in joined]
        summary = GroupSummary(
            lengths=tuple(len(answer.token_ids) for answer in joined),
            rewards=(0.0,) * len(joined),
            tokens=len(versions),
            min_version=min(versions),
            max_version=max(versions),
            correct=correct,
            truncated=0,
        )
        return summary, b""
