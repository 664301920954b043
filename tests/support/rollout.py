"""Stand-ins for the parts around the rollout core, in virtual time: an engine, an environment and a prompt source."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import orjson

from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, join_completions
from areal_core.controller.core.tables import Place
from areal_core.errors import GenerationError, RewardError
from areal_core.types import Completion, GenerationRequest, GroupSummary, Outcome, PolicyVersion, Prompt, SampleRequest
from tests.support.records import packed

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
    """Takes a random time for each completion and holds versions as real servers do. No two tokens that it samples are
    the same one, so that each can be followed. With `interrupts`, an update aborts running completions, which are
    then continued.

    `sampled` is its own counter, independent of groups. With probability `fail` a completion, also the rest of one,
    fails before it samples; with `garble` its body lacks log-probabilities."""

    def __init__(
        self, rng: random.Random, *, capacity: int, fail: float = 0.0, garble: float = 0.0, interrupts: bool = False
    ) -> None:
        self.rng, self.capacity, self.fail, self.garble, self.interrupts = rng, capacity, fail, garble, interrupts
        self.in_flight = 0  # completions
        self.freed: Callable[[], None] = lambda: None  # is called when one has ended
        self.version = 0
        self.loads: list[int] = []  # versions
        self.versions: list[int] = []  # that sampled token FIRST_TOKEN + i
        self.contexts: dict[int, tuple[int, ...]] = {}  # of a request, by the first token that it sampled
        self.seeds: dict[str, int] = {}  # by request id
        self.tries: Counter[str] = Counter()
        self.interrupted = 0  # completions that were requested again
        self.cut_off = 0  # requests that were cancelled
        self._interruption = asyncio.Event()
        self._ending = False

    @property
    def sampled(self) -> int:
        """Tokens, whatever became of them."""
        return len(self.versions)

    @property
    def room(self) -> int:
        return max(0, self.capacity - self.in_flight)

    async def generate(self, pending: PendingCompletions) -> None:
        first = None if pending.begun else pending.request
        pending.sent = True
        self.in_flight += len(pending.unfinished())
        calls = [self._finish(pending, index, first) for index in pending.unfinished()]
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _finish(self, pending: PendingCompletions, index: int, first: GenerationRequest | None) -> None:
        try:
            if first is not None:
                await self._send(pending, index, first)
            while not self._ending and index in pending.unfinished():
                self.interrupted += 1
                await self._send(pending, index, pending.continuation(index))
        finally:
            self.in_flight -= 1
            self.freed()

    async def _send(self, pending: PendingCompletions, index: int, request: GenerationRequest) -> None:
        """When cancelled, what a request has sampled is returned all the same."""
        version = self.version
        try:
            pending.take([index], receive(await self.serve(request)))
        except asyncio.CancelledError:
            self.cut_off += 1
            pending.take([index], receive(body([self._sample(version, request, 0, 5, "abort")], version)))
            raise

    async def serve(self, request: GenerationRequest) -> bytes:
        """One completion of a request."""
        version = self.version
        assert self.seeds.setdefault(request.request_id, request.seed) == request.seed
        self.tries[request.request_id] += 1
        assert request.max_tokens > 0
        try:
            async with asyncio.timeout(self.rng.expovariate(1.0)):
                await self._interruption.wait()
        except TimeoutError:
            if self.rng.random() < self.fail:
                raise GenerationError("the server is gone") from None
            completion = self._sample(version, request, 1, 30, "stop")
        else:
            how = (1, 5, "stop") if self.rng.random() < 0.3 else (0, 5, "abort")
            completion = self._sample(version, request, *how)
        garbled = self.garble > 0 and self.rng.random() < self.garble
        return body([completion], version, logprobs=not garbled)

    async def load_version(self, version: PolicyVersion) -> None:
        self.loads.append(version.version)
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
            self.contexts[first] = tuple(map(int, request.token_ids))
        return tokens, finish


class FakeRewards:
    """Scores finished completions, and keeps them. A trajectory is correct with probability `right`; with probability
    `more` the environment requests more completions, again and again."""

    def __init__(
        self, rng: random.Random, *, n: int = 2, fail: float = 0.0, right: float = 0.0, more: float = 0.0
    ) -> None:
        """`n`: completions of a group."""
        self.rng, self.n, self.fail, self.right, self.more = rng, n, fail, right, more
        self.partial = 0.0  # the reward of a wrong completion; unless it is 0, no completion counts as right
        self.uniform_tokens = 0  # of groups whose completions were all correct or all wrong
        self.scored: list[
            tuple[tuple[int, ...], list[int], list[int]]
        ] = []  # text before a completion, tokens, versions
        self.open = 0
        self.early = False  # the environment ends with the completions that come first
        self.opens = True  # the environment opens with the prompt
        self.failure: type[RewardError] = RewardError

    def begin(self, prompt: Prompt, n: int, *, apart: bool) -> FakeSession:
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
        rewards = (self.partial,) * (n - correct) + (1.0,) * correct
        self.scored += [(text, one.token_ids.tolist(), one.versions.tolist()) for text, one in turns]
        summary = GroupSummary(
            **packed([len(completion.token_ids) for _, completion in turns[:n]])
            | {"rewards": rewards, "tokens": len(versions) - unused},
            unused_tokens=unused,
            min_version=min(versions),
            max_version=max(versions),
            outcomes={
                Outcome.CORRECT: 0 if self.partial else correct,
                Outcome.INCORRECT: n if self.partial else n - correct,
            },
        )
        return ScoredGroup(payload=b"", summary=summary)


class FakeSession:
    def __init__(self, rewards: FakeRewards, prompt: Prompt) -> None:
        self.rewards = rewards
        self.opening = SampleRequest(
            token_ids=prompt.token_ids, calls=tuple((place, 0) for place in range(rewards.n)), max_tokens=30
        )
        self.texts = [prompt.token_ids]  # of its requests
        self.missing = {(0, index) for index in range(rewards.n)}
        self.begun = rewards.opens
        self.delivered = asyncio.Queue[Sequence[Arrival]]()
        self.turns: dict[tuple[int, int], tuple[tuple[int, ...], Completion]] = {}

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        self.delivered.put_nowait(arrivals)

    async def next_outcome(self) -> tuple[SampleRequest, ...] | ScoredGroup:
        while (outcome := await self._outcome(await self.delivered.get())) == ():
            pass
        return outcome

    async def _outcome(self, arrivals: Sequence[Arrival]) -> tuple[SampleRequest, ...] | ScoredGroup:
        rewards = self.rewards
        await asyncio.sleep(rewards.rng.uniform(0.0, 0.1))
        if rewards.rng.random() < rewards.fail:
            raise rewards.failure("the verifier broke")
        if not self.begun:
            self.begun = True
            return (self.opening,)
        for each, completion in zip(arrivals, join_completions([each.completion for each in arrivals]), strict=True):
            assert completion.finish_reason in ("stop", "length")
            self.missing.remove((each.request, each.index))
            self.turns[each.request, each.index] = self.texts[each.request], completion
        if self.missing and not rewards.early:
            return ()
        if rewards.more and rewards.rng.random() < rewards.more:
            places = range(rewards.rng.randint(1, 3))
            call = len(self.texts)
            asked = tuple(
                SampleRequest(
                    token_ids=(9, place),
                    calls=tuple((rollout, call + place) for rollout in range(1 + place % 2)),
                    max_tokens=20,
                )
                for place in places
            )
            self.missing = {(call + place, index) for place, one in enumerate(asked) for index in range(len(one.calls))}
            self.texts += [request.token_ids for request in asked]
            return asked
        return await rewards.score([self.turns[key] for key in sorted(self.turns)], rewards.n)

    def close(self) -> None:
        self.rewards.open -= 1
