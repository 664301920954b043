"""One group's rollouts inside a worker: coroutines of the environment, suspended while they wait for the policy.

    advance(completions that have ended) -> their next requests to the policy, or the scored group

Nothing here knows of processes: `rewards.worker` runs it in one, benchmarks and tests in their own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, join_completions
from areal_core.config.schema import RunConfig
from areal_core.environments.environment import Environment
from areal_core.errors import RewardError, RolloutLimitError
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.record import RecordingPolicy
from areal_core.rewards.scoring import sample_of, scored_group
from areal_core.types import Completion, Outcome, Prompt, Rollout, Sample, SampleRequest

Requests = tuple[SampleRequest, ...]


_TURNS = 8  # of the event loop, in which rollouts do what they can with the completions that they have got


class GroupRollout:
    """The rollouts of one group, from their first turns to their scores."""

    def __init__(self, environment: Environment, task: Prompt, config: RunConfig, *, n: int | None = None) -> None:
        """`n` rollouts; None: algorithm.group_size."""
        self._n = config.algorithm.group_size if n is None else n
        self._environment = environment
        self._task = task
        self._config = config
        self._calls = _Calls()
        self._policies: list[RecordingPolicy] = []
        self._rollouts: asyncio.Future[list[Rollout]] | None = None
        self.failure: str | None = None  # the first of its verifier, as errors.VerifierError says it

    async def advance(self, arrived: Sequence[Arrival]) -> Requests | ScoredGroup:
        """Resume with completions that have ended: of the group's opening, or of requests that were returned before.
        Returns the next requests, none where rollouts wait for others of their completions, or the scored group.

        Raises GenerationError for a response that holds no completions, RewardError for rollouts that can't be scored.
        """
        completions = join_completions([each.completion for each in arrived])
        for each in completions:
            if each.finish_reason not in ("stop", "length") or len(each.token_ids) == 0:
                raise RewardError(f"a completion is not finished: {each.finish_reason}, {len(each.token_ids)} tokens")
        if self._rollouts is None:
            self._begin()
        self._calls.deliver(arrived, completions)
        assert self._rollouts is not None
        requested = asyncio.ensure_future(self._calls.requested())
        try:
            await asyncio.wait((self._rollouts, requested), return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()
        if self._rollouts.done():
            return self._scored(await self._rollouts)
        return self._calls.take_requests()

    def samples(self, tokenizer: Tokenizer) -> tuple[Sample, ...]:
        """The rollouts, once they are scored."""
        assert self._rollouts is not None
        return tuple(sample_of(rollout, tokenizer) for rollout in self._rollouts.result())

    def close(self) -> None:
        """Cancel the rollouts."""
        if self._rollouts is not None:
            self._rollouts.cancel()

    def _begin(self) -> None:
        opens, n = self._environment.opens_with_prompt, self._n
        if opens:
            self._calls.open(n)
        self._policies = [
            RecordingPolicy(
                task=self._task,
                limits=self._config.task,
                max_turns=self._environment.max_turns,
                opens=opens,
                complete=functools.partial(self._calls.complete, rollout),
            )
            for rollout in range(n)
        ]
        self._rollouts = asyncio.ensure_future(self._side_by_side())

    async def _side_by_side(self) -> list[Rollout]:
        """The rollouts, in their order. The first failure ends them all."""
        tasks = [asyncio.ensure_future(self._rollout(policy)) for policy in self._policies]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _rollout(self, policy: RecordingPolicy) -> Rollout:
        try:
            rollout = await self._environment.rollout(self._task, policy)
        except RolloutLimitError:
            reward = self._config.algorithm.reward_incorrect if policy.trajectories() else None
            rollout = Rollout(reward=reward, outcome=Outcome.OVER_LIMIT, truncated=True)
        return policy.finished(rollout)

    def _scored(self, rollouts: Sequence[Rollout]) -> ScoredGroup:
        metrics: dict[str, list[float]] = {}
        if self._environment.max_turns > 1:
            held = [rollout.trajectories or () for rollout in rollouts]
            metrics["rollout/sequences"] = [float(len(its)) for its in held]
            metrics["rollout/turns"] = [
                float(sum(segment.call >= 0 for one in its for segment in one.segments)) for its in held
            ]
        return scored_group(
            rollouts, self._config.algorithm, sampled_tokens=self._calls.sampled_tokens, metrics=metrics
        )


_Asked = tuple[tuple[int, ...], int, tuple[int, ...]]  # text, limit and stop tokens of a call


class _Calls:
    """The calls of a group's rollouts, whose completions come from outside, in whatever order they end."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], asyncio.Future[Completion]] = {}  # by request and index
        self._opening: dict[int, asyncio.Future[Completion]] = {}  # of rollouts that have not called yet
        self._new: dict[_Asked, list[tuple[tuple[int, int], asyncio.Future[Completion]]]] = {}
        self._requests = 0  # so far
        self._called = asyncio.Event()
        self.sampled_tokens = 0

    def open(self, n: int) -> None:
        """The first request is that for the first turns of n rollouts: it was sent before they have called."""
        loop = asyncio.get_running_loop()
        self._opening = {rollout: loop.create_future() for rollout in range(n)}
        self._waiting = {(0, rollout): future for rollout, future in self._opening.items()}
        self._requests = 1

    async def complete(
        self, rollout: int, call: int, token_ids: tuple[int, ...], max_tokens: int, stop: tuple[int, ...]
    ) -> Completion:
        if (future := self._opening.pop(rollout, None)) is None:
            future = asyncio.get_running_loop().create_future()
            self._new.setdefault((token_ids, max_tokens, stop), []).append(((rollout, call), future))
            self._called.set()
        return await future

    def deliver(self, arrived: Sequence[Arrival], completions: Sequence[Completion]) -> None:
        for one, completion in zip(arrived, completions, strict=True):
            self.sampled_tokens += len(completion.token_ids)
            future = self._waiting.pop((one.request, one.index))
            if not future.cancelled():  # else the rollout has given the call up
                future.set_result(completion)

    async def requested(self) -> None:
        """Wait until rollouts request completions, or have done what they can with those that they have got while
        others are still to come. Rollouts that call `sample` at the same moment all do so before this resumes: their
        requests go out together."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if not self._waiting:
            await self._called.wait()

    def take_requests(self) -> Requests:
        new, self._new = self._new, {}
        self._called.clear()
        requests: list[SampleRequest] = []
        for (token_ids, max_tokens, stop), made in new.items():
            calls = [each for each in made if not each[1].cancelled()]
            if not calls:
                continue
            for index, (_, future) in enumerate(calls):
                self._waiting[self._requests, index] = future
            self._requests += 1
            requests.append(
                SampleRequest(
                    token_ids=token_ids, calls=tuple(call for call, _ in calls), max_tokens=max_tokens, stop=stop
                )
            )
        return tuple(requests)
