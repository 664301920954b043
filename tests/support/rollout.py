"""Stand-ins for the parts around the rollout core, in virtual time: an engine, a scorer and a prompt source."""

from __future__ import annotations

import asyncio
import random

import orjson

from areal_core.errors import GenerationError, RewardError
from areal_core.types import GenerationRequest, GroupSummary, PolicyVersion, Prompt


def body(lengths: list[int], version: int, *, finish: str = "stop") -> bytes:
    """A server's answer with `lengths[j]` tokens in choice j, all sampled by `version`."""
    choices = [
        {
            "index": index,
            "finish_reason": finish,
            "token_ids": [5] * length,
            "weight_versions": [{"version": str(version), "start": 0, "end": length}],
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}] * length},
        }
        for index, length in enumerate(lengths)
    ]
    return orjson.dumps({"choices": choices})


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, prompt_id=f"{index:x}", text=f"{index}=", token_ids=(1, 2, 3), answer="0")


class FakeEngine:
    """Takes a random time for each group, holds versions as real servers do, and counts every token it samples."""

    def __init__(self, rng: random.Random, *, capacity: int, fail: float = 0.0) -> None:
        self.rng, self.capacity, self.fail = rng, capacity, fail
        self.version = 0
        self.sampled = 0
        self.seeds: dict[str, int] = {}  # by request id
        self._abort = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> bytes:
        version = self.version
        self.seeds[request.request_id] = request.seed
        try:
            async with asyncio.timeout(self.rng.expovariate(1.0)):
                await self._abort.wait()
        except TimeoutError:
            if self.rng.random() < self.fail:
                raise GenerationError("the server is gone") from None
            lengths = [self.rng.randint(1, 30) for _ in range(request.n)]
        else:
            lengths = [self.rng.randint(0, 5) for _ in range(request.n)]
        self.sampled += sum(lengths)
        return body(lengths, version, finish="abort" if self._abort.is_set() else "stop")

    async def load_version(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        self.version = version.version

    async def abort_all(self) -> None:
        self._abort.set()
        await asyncio.sleep(0.01)  # a server takes its time to say so, longer than its requests take to end


class FakeScorer:
    def __init__(self, rng: random.Random, *, fail: float = 0.0) -> None:
        self.rng, self.fail = rng, fail

    async def score(self, prompt: Prompt, answer: bytes) -> tuple[GroupSummary, bytes]:
        await asyncio.sleep(self.rng.uniform(0.0, 0.1))
        if self.rng.random() < self.fail:
            raise RewardError("the verifier broke")
        choices = orjson.loads(answer)["choices"]
        lengths = tuple(len(choice["token_ids"]) for choice in choices)
        version = int(choices[0]["weight_versions"][0]["version"])
        summary = GroupSummary(
            lengths=lengths,
            rewards=(0.0,) * len(lengths),
            tokens=sum(lengths),
            min_version=version,
            max_version=version,
            correct=0,
            truncated=0,
        )
        return summary, answer
