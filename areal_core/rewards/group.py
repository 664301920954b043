"""One group's rollouts inside a worker: the environment's coroutine, suspended while it waits for the policy.

    advance(completions that have ended) -> its next requests to the policy, or the scored group

Nothing here knows of processes: `rewards.worker` runs it in one, benchmarks and tests in their own.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_core.api.scored_groups import ScoredGroup, pack_group
from areal_core.api.wire import Arrival, join_completions
from areal_core.environments.environment import Environment
from areal_core.errors import RewardError
from areal_core.types import (
    Completion,
    GroupPayload,
    GroupSummary,
    Int32Array,
    Outcome,
    Prompt,
    SampleRequest,
    Segment,
    Trajectory,
)

Requests = tuple[SampleRequest, ...]


_TURNS = 8  # of the event loop, in which an environment does what it can with the completions that it has got


class GroupRollout:
    """The rollouts of one group, from the completions that it begins with to its scores."""

    def __init__(self, environment: Environment, prompt: Prompt, *, n: int, max_new_tokens: int) -> None:
        self._environment = environment
        self._prompt = prompt
        self._n = n
        self._policy = _Policy(prompt, n, max_new_tokens)
        self._rollout: asyncio.Task[list[Trajectory]] | None = None
        self.failure: str | None = None  # the first of its verifier, as errors.VerifierError says it

    async def advance(self, arrived: Sequence[Arrival]) -> Requests | ScoredGroup:
        """Resume with completions that have ended: of the prompt, which the group begins with, or of requests that were
        returned before. Returns the next requests, none where the environment waits for others of its completions, or
        the scored group.

        Raises GenerationError for a response that holds no completions, RewardError for rollouts that can't be scored.
        """
        completions = join_completions([each.completion for each in arrived])
        for each in completions:
            if each.finish_reason not in ("stop", "length") or len(each.token_ids) == 0:
                raise RewardError(f"a completion is not finished: {each.finish_reason}, {len(each.token_ids)} tokens")
        self._policy.deliver(arrived, completions)
        if self._rollout is None:
            work = self._environment.rollout_group(self._prompt, self._policy, self._n)
            self._rollout = asyncio.ensure_future(work)
        requested = asyncio.ensure_future(self._policy.requested())
        try:
            await asyncio.wait((self._rollout, requested), return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()
        if self._rollout.done():
            return self._scored(await self._rollout)
        return self._policy.take_requests()

    def close(self) -> None:
        """Cancel the rollouts."""
        if self._rollout is not None:
            self._rollout.cancel()

    def _scored(self, trajectories: Sequence[Trajectory]) -> ScoredGroup:
        prompt = _common_prompt(trajectories, self._n)
        rests = [_rest(trajectory) for trajectory in trajectories]
        lengths = [sum(len(segment.token_ids) for segment in rest) for rest in rests]
        rewards = [
            None if trajectory.reward is None else _number("a reward", trajectory.reward, " or None")
            for trajectory in trajectories
        ]
        metrics: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for name, value in trajectory.metrics.items():
                metrics.setdefault(name, []).append(_number(f"metric {name}", value))
        if all(reward is None for reward in rewards):
            raise RewardError("the verifier found no result for any completion of the group")

        def joined(field: str, kind: Any) -> Any:
            return np.concatenate([getattr(segment, field) for rest in rests for segment in rest]).astype(kind)

        judged = np.repeat([reward is not None for reward in rewards], lengths)
        payload = GroupPayload(
            prompt_tokens=prompt,
            lengths=np.array(lengths, np.int32),
            tokens=joined("token_ids", np.int32),
            loss_mask=joined("loss_mask", np.bool_) & judged,
            logprobs=joined("logprobs", np.float32),
            versions=joined("versions", np.int32),
            truncated=np.array([trajectory.truncated for trajectory in trajectories], np.bool_),
        )
        versions = payload.versions[payload.versions >= 0]
        if versions.min() < self._policy.oldest:
            raise RewardError("environment: a token has a version older than any that sampled for the group")
        packed, checksums = pack_group(payload)
        summary = GroupSummary(
            prompt_tokens=len(prompt),
            checksums=checksums,
            lengths=tuple(lengths),
            rewards=tuple(rewards),
            tokens=len(versions),
            min_version=int(versions.min()),
            max_version=int(versions.max()),
            outcomes=dict(Counter(Outcome(trajectory.outcome) for trajectory in trajectories)),
            truncated=tuple(payload.truncated.tolist()),
            unused_tokens=self._policy.sampled_tokens - len(versions),
            metrics={name: tuple(values) for name, values in metrics.items()},
        )
        return ScoredGroup(payload=packed, summary=summary)


class _Policy:
    """`environments.Policy` whose completions come from outside, in whatever order they end."""

    def __init__(self, prompt: Prompt, n: int, max_new_tokens: int) -> None:
        self._prompt = prompt
        self._limit = len(prompt.token_ids) + max_new_tokens
        self._first = n  # completions of the prompt that are handed to nobody yet
        self._n = n
        self._here: dict[tuple[int, int], Completion] = {}  # by request and index, until they are handed out
        self._wanted: dict[tuple[int, int], asyncio.Future[Completion]] = {}  # those that somebody waits for
        self._requests = 0  # so far, beside the first
        self._new: list[SampleRequest] = []
        self._called = asyncio.Event()
        self.sampled_tokens = 0
        self.oldest = math.inf  # version that has sampled any of them

    async def sample(self, token_ids: Sequence[int], *, n: int = 1, max_tokens: int | None = None) -> list[Completion]:
        room = self.room(token_ids)
        limit = room if max_tokens is None else max_tokens
        if not 1 <= limit <= room or n < 1:
            raise RewardError(
                f"environment: asked for {n} completions of at most {limit} tokens; there is room for {room} "
                "(task.max_new_tokens)"
            )
        if limit == room and n <= self._first and tuple(token_ids) == self._prompt.token_ids:
            request, start = 0, self._n - self._first
            self._first -= n
        else:
            self._requests += 1
            request, start = self._requests, 0
            numbers = tuple(map(int, token_ids))  # not numpy's
            self._new.append(SampleRequest(token_ids=numbers, n=int(n), max_tokens=int(limit)))
            self._called.set()
        return [await self._completion(request, index) for index in range(start, start + n)]

    def room(self, token_ids: Sequence[int]) -> int:
        return self._limit - len(token_ids)

    def deliver(self, arrived: Sequence[Arrival], completions: Sequence[Completion]) -> None:
        for one, completion in zip(arrived, completions, strict=True):
            self.sampled_tokens += len(completion.token_ids)
            self.oldest = min(self.oldest, completion.versions.min())
            key = one.request, one.index
            wanted = self._wanted.pop(key, None)
            if wanted is None or wanted.cancelled():
                self._here[key] = completion
            else:
                wanted.set_result(completion)

    async def requested(self) -> None:
        """Wait until the environment requests completions, or has done what it can with those that it has got while
        others are still to come. Rollouts that call `sample` at the same moment all do so before this resumes: their
        requests go out together."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if not self._wanted:
            await self._called.wait()

    def take_requests(self) -> Requests:
        requests, self._new = tuple(self._new), []
        self._called.clear()
        return requests

    async def _completion(self, request: int, index: int) -> Completion:
        if (completion := self._here.pop((request, index), None)) is not None:
            return completion
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._wanted[request, index] = future
        try:
            return await future
        finally:
            self._wanted.pop((request, index), None)


def _common_prompt(trajectories: Sequence[Trajectory], n: int) -> Int32Array:
    """The first segment of all trajectories of a group."""
    if len(trajectories) != n:
        raise RewardError(f"environment: must give {n} trajectories, got {len(trajectories)}")
    prompts = [trajectory.segments[0] for trajectory in trajectories]
    first = prompts[0].token_ids
    if not len(first) or any(segment.loss_mask.any() for segment in prompts):
        raise RewardError(
            "environment: a trajectory's first segment must be its prompt, which the policy did not sample"
        )
    if any(not np.array_equal(first, segment.token_ids) for segment in prompts):
        raise RewardError("environment: all trajectories of a group must begin with the same prompt")
    return first


def _rest(trajectory: Trajectory) -> Sequence[Segment]:
    """What follows a trajectory's prompt."""
    segments = trajectory.segments[1:]
    if not any((segment.versions >= 0).any() for segment in segments):
        raise RewardError("environment: a trajectory must hold tokens that the policy sampled")
    if any((segment.loss_mask & (segment.versions < 0)).any() for segment in segments):
        raise RewardError("environment: loss_mask must be False where the policy did not sample")
    return segments


def _number(what: str, value: object, otherwise: str = "") -> float:
    """Python's own number, whatever kind of number the environment has given. Raises RewardError."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"environment: {what} must be a finite number{otherwise}, got {value!r:.200}")
    return number
