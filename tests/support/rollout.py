"""Stand-ins for the parts around the rollout core, in virtual time: an engine, an environment and a prompt source."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence

import orjson

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.transcript import Transcript
from areal_core.api.wire import SampledCompletion, join_completions
from areal_core.errors import GenerationError, RewardError
from areal_core.rollout.payloads import Place
from areal_core.types import Completion, GenerationRequest, GroupSummary, Outcome, PolicyVersion, Prompt, SampleRequest

FIRST_TOKEN = 100  # above the prompts' and the stop token


def body(completions: Sequence[tuple[Sequence[int], str]], version: int, *, logprobs: bool = True) -> bytes:
    """A server's response: tokens and finish reason of every choice, all sampled by `version`."""

    def content(tokens: Sequence[int]) -> dict[str, object]:
        return {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]}

    choices = [
        {
            "index": index,
            "finish_reason": finish,
            "token_ids": list(tokens),
            "weight_versions": [{"version": str(version), "start": 0, "end": len(tokens)}] if tokens else [],
            "logprobs": content(tokens) if logprobs else None,
        }
        for index, (tokens, finish) in enumerate(completions)
    ]
    usage = {"completion_tokens": sum(len(tokens) for tokens, _ in completions)}
    return orjson.dumps({"usage": usage, "choices": choices})


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, prompt_id=f"{index:x}", text=f"{index}=", token_ids=(1, 2, 3), answer="0")


class FakePayloads:
    """Takes its time to store a payload."""

    async def append(self, payload: bytes) -> Place:
        await asyncio.sleep(0.01)
        return Place(segment="a", start=0, bytes=len(payload), crc32=0)


class FakeEngine:
    """Takes a random time for each request and holds versions as real servers do. No two tokens that it samples are
    the same one, so that each can be followed. With `interrupts`, an update aborts running requests, which are
    then continued.

    `sampled` is its own counter, independent of groups. With probability `fail` a request, also one for the rest of a
    completion, fails before it samples; with `garble` its body lacks log-probabilities."""

    def __init__(
        self,
        rng: random.Random,
        *,
        capacity: int,
        fail: float = 0.0,
        garble: float = 0.0,
        interrupts: bool = False,
    ) -> None:
        self.rng, self.capacity, self.fail, self.garble, self.interrupts = rng, capacity, fail, garble, interrupts
        self.version = 0
        self.versions: list[int] = []  # that sampled token FIRST_TOKEN + i
        self.contexts: dict[int, tuple[int, ...]] = {}  # of a request, by the first token that it sampled
        self.seeds: dict[str, int] = {}  # by request id
        self.interrupted = 0  # completions that were requested again
        self.cut_off = 0  # requests that were cancelled
        self._interruption = asyncio.Event()
        self._ending = False

    @property
    def sampled(self) -> int:
        """Tokens, whatever became of them."""
        return len(self.versions)

    async def generate(self, transcript: Transcript) -> None:
        if not transcript.begun:
            await self._return_body(transcript.request, transcript.begin)
        while not self._ending and (unfinished := transcript.unfinished()):
            self.interrupted += 1
            take = functools.partial(transcript.extend, unfinished[0])
            await self._return_body(transcript.continuation(unfinished[0]), take)

    async def _return_body(self, request: GenerationRequest, take: Callable[[bytes], None]) -> None:
        """When cancelled, what a request has sampled is returned all the same."""
        version = self.version
        try:
            take(await self.serve(request))
        except asyncio.CancelledError:
            self.cut_off += 1
            take(body([self._sample(version, request, 0, 5, "abort") for _ in range(request.n)], version))
            raise

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
            completions = [self._sample(version, request, 1, 30, "stop") for _ in range(request.n)]
        else:
            completions = [
                self._sample(version, request, *((1, 5, "stop") if self.rng.random() < 0.3 else (0, 5, "abort")))
                for _ in range(request.n)
            ]
        garbled = self.garble > 0 and self.rng.random() < self.garble
        return body(completions, version, logprobs=not garbled)

    async def load_version(self, version: PolicyVersion) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        self.version = version.version
        if self.interrupts and not self._ending:
            self._interruption.set()
            self._interruption = asyncio.Event()

    async def abort_all(self) -> None:
        self._ending = True
        self._interruption.set()
        await asyncio.sleep(0.01)  # a server responds later than its requests end

    def _sample(self, version: int, request: GenerationRequest, low: int, high: int, finish: str) -> tuple[range, str]:
        first = FIRST_TOKEN + len(self.versions)
        tokens = range(first, first + min(self.rng.randint(low, high), request.max_tokens))
        self.versions += [version] * len(tokens)
        if tokens:
            self.contexts[first] = request.token_ids
        return tokens, finish


class FakeRewards:
    """Scores finished completions, and keeps them. A trajectory is correct with probability `right`; with probability
    `more` the environment requests more completions, again and again."""

    def __init__(self, rng: random.Random, *, fail: float = 0.0, right: float = 0.0, more: float = 0.0) -> None:
        self.rng, self.fail, self.right, self.more = rng, fail, right, more
        self.uniform_tokens = 0  # of groups whose completions were all correct or all wrong
        self.further = 0  # completions of later turns
        self.scored: list[
            tuple[tuple[int, ...], list[int], list[int]]
        ] = []  # text before a completion, tokens, versions
        self.open = 0
        self.failure: type[RewardError] = RewardError

    def begin(self, prompt: Prompt) -> FakeSession:
        self.open += 1
        return FakeSession(self, prompt)

    async def score(self, turns: Sequence[tuple[tuple[int, ...], Completion]], n: int) -> ScoredGroup:
        """A group of `n`, from every completion that it took and the text before it."""
        versions = [version for _, completion in turns for version in completion.versions.tolist()]
        # No draw without need: it would change all others.
        correct = sum(self.rng.random() < self.right for _ in range(n)) if self.right else 0
        uniform = correct in (0, n)
        self.uniform_tokens += len(versions) if uniform else 0
        unused = 1 if uniform and self.right else 0
        self.scored += [(text, one.token_ids.tolist(), one.versions.tolist()) for text, one in turns]
        summary = GroupSummary(
            lengths=tuple(len(completion.token_ids) for _, completion in turns[:n]),
            rewards=(0.0,) * n,
            tokens=len(versions) - unused,
            unused_tokens=unused,
            min_version=min(versions),
            max_version=max(versions),
            outcomes={Outcome.RIGHT: correct},
            truncated=(False,) * n,
        )
        return ScoredGroup(payload=b"", summary=summary)


class FakeSession:
    def __init__(self, rewards: FakeRewards, prompt: Prompt) -> None:
        self.rewards, self.prompt = rewards, prompt
        self.asked: tuple[SampleRequest, ...] | None = None
        self.turns: list[tuple[tuple[int, ...], Completion]] = []
        self.n = 0

    async def advance(
        self, completions: Sequence[Sequence[SampledCompletion]]
    ) -> tuple[SampleRequest, ...] | ScoredGroup:
        rewards = self.rewards
        await asyncio.sleep(rewards.rng.uniform(0.0, 0.1))
        if rewards.rng.random() < rewards.fail:
            raise rewards.failure("the verifier broke")
        joined = [join_completions(part) for part in completions]
        assert {one.finish_reason for part in joined for one in part} <= {"stop", "length"}
        if self.asked is None:
            self.n, texts = len(joined[0]), [self.prompt.token_ids]
        else:
            assert [len(part) for part in joined] == [request.n for request in self.asked]
            texts, rewards.further = [request.token_ids for request in self.asked], rewards.further + len(joined)
        self.turns += [(text, one) for text, part in zip(texts, joined, strict=True) for one in part]
        if rewards.more and rewards.rng.random() < rewards.more:
            places = range(rewards.rng.randint(1, 3))
            self.asked = tuple(SampleRequest(token_ids=(9, place), n=1 + place % 2, max_tokens=20) for place in places)
            return self.asked
        return await rewards.score(self.turns, self.n)

    def close(self) -> None:
        self.rewards.open -= 1
