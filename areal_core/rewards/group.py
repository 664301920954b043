"""Run one group's rollouts in a worker: environment coroutines that await the policy.

    deliver(finished completions); said() -> their next requests to the policy, or the scored group

This module knows no processes. `rewards.worker` runs it in a worker process; benchmarks and tests run it in their own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, join_completions
from areal_core.config.schema import RunConfig
from areal_core.environments import verdicts
from areal_core.environments.environment import Environment
from areal_core.errors import (
    ArealError,
    GenerationError,
    RewardError,
    RewardTimeoutError,
    RolloutLimitError,
    VerifierError,
)
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.record import RecordingPolicy
from areal_core.rewards.scoring import sample_of, scored_group
from areal_core.types import Completion, Outcome, Prompt, Rollout, SampleRequest

Requests = tuple[SampleRequest, ...]


class OutcomeQueue:
    """A queue of the outcomes that a group sends to its caller."""

    def __init__(self) -> None:
        self._outcomes = asyncio.Queue[Any]()

    def report(self, outcome: Any) -> None:
        self._outcomes.put_nowait(outcome)

    async def next_outcome(self) -> Any:
        """Wait for the next requests of the rollouts, or for the scored group.

        Raises GenerationError for a response without completions. Raises RewardError for rollouts that fail, can't be
        scored, take too long or lose their worker."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, ArealError):
            raise outcome
        return outcome


class GroupRollout(OutcomeQueue):
    """The rollouts of one group, from their first turns to their scores; implements `rollouts.Session`."""

    def __init__(
        self,
        environment: Environment,
        task: Prompt,
        config: RunConfig,
        *,
        n: int | None = None,
        shown_with: Tokenizer | None = None,
    ) -> None:
        """`n` is the number of rollouts; None: algorithm.group_size.
        `shown_with` decodes samples for the scored group."""
        self._n = config.algorithm.group_size if n is None else n
        self._shown_with = shown_with
        self._environment = environment
        self._task = task
        self._config = config
        super().__init__()
        self._calls = _Calls(self.report)
        self._policies: list[RecordingPolicy] = []
        self._tasks: list[asyncio.Task[Rollout]] = []  # one for each rollout
        self._rollouts: asyncio.Task[list[Rollout]] | None = None
        self._failures: list[str] = []  # messages of the verifier's VerifierErrors

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        """Begin the rollouts, or resume them with finished completions.
        The completions belong to the group's opening request, or to requests that `next_outcome` has returned."""
        try:
            completions = join_completions([each.completion for each in arrivals])
            for each in completions:
                if each.finish_reason not in ("stop", "length") or len(each.token_ids) == 0:
                    raise RewardError(f"a completion is unfinished: {each.finish_reason}, {len(each.token_ids)} tokens")
        except (GenerationError, RewardError) as error:
            self.report(error)
            self.close()
            return
        if self._rollouts is None:
            self._rollouts = self._begin()
        self._calls.deliver(arrivals, completions)

    def cut(self) -> None:
        """End unfinished rollouts: without a result if they wait for the policy, else as incorrect."""
        asyncio.get_running_loop().call_soon(self._cut)  # after their first steps, if they have just begun

    def _cut(self) -> None:
        for policy, task in zip(self._policies, self._tasks, strict=True):
            if not task.done():
                policy.ended = Outcome.TIMED_OUT if policy.begun and not policy.waits else Outcome.CUT
                task.cancel()
        self._expect_end()

    def close(self) -> None:
        """Cancel the rollouts."""
        for task in self._tasks:  # needed if `_side_by_side` has not started
            task.cancel()
        self._expect_end()

    def _expect_end(self) -> None:
        if not all(task.done() for task in self._tasks):
            asyncio.get_running_loop().call_later(self._config.rollout.reward_timeout_s, self._overdue)

    def _overdue(self) -> None:
        """End the process if cancelled rollouts still run, because they would sample for nothing."""
        if not all(task.done() for task in self._tasks):
            on_uncancelled(RewardTimeoutError("the environment: a rollout swallows CancelledError; let it propagate"))

    def _begin(self) -> asyncio.Task[list[Rollout]]:
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
        self._tasks = [asyncio.ensure_future(self._rollout(policy)) for policy in self._policies]
        rollouts = asyncio.get_running_loop().create_task(self._side_by_side())
        rollouts.add_done_callback(self._ended)
        return rollouts

    async def _side_by_side(self) -> list[Rollout]:
        """Return the rollouts, in order. The first failure cancels the others."""
        try:
            return list(await asyncio.gather(*self._tasks))
        finally:
            for task in self._tasks:
                task.cancel()

    async def _rollout(self, policy: RecordingPolicy) -> Rollout:
        running = _Running(self._failures, self._config.rollout.reward_timeout_s)
        _current.set(running)  # also inherited by tasks that the rollout starts
        try:
            async with _place(self._environment):
                policy.begun = True
                rollout = await running.limited(self._environment.rollout(self._task, policy))
        except RolloutLimitError:
            rollout = self._incorrect(policy, Outcome.OVER_LIMIT)
        except asyncio.CancelledError:
            if policy.ended is None:
                raise
            if policy.ended is Outcome.CUT:
                return Rollout(reward=None, outcome=Outcome.CUT, trajectories=(), truncated=False)
            rollout = self._incorrect(policy, policy.ended)
        return policy.finished(rollout)

    def _incorrect(self, policy: RecordingPolicy, outcome: Outcome) -> Rollout:
        """A rollout that exceeded one of its own limits.
        Without a turn it has no reward, as nothing can be trained on."""
        reward = self._config.algorithm.reward_incorrect if policy.trajectories() else None
        return Rollout(reward=reward, outcome=outcome)

    def _ended(self, rollouts: asyncio.Task[list[Rollout]]) -> None:
        try:
            outcome = replace(self._scored(found := rollouts.result()), failure=next(iter(self._failures), None))
            if self._shown_with is not None:
                outcome = replace(outcome, samples=tuple(sample_of(one, self._shown_with) for one in found))
        except BaseException as error:  # noqa: BLE001 - the boundary to user code
            outcome = known_error(error)
            if self._failures and isinstance(outcome, RewardError) and not isinstance(outcome, RewardTimeoutError):
                outcome = VerifierError(self._failures[0])
        self.report(outcome)

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


class _Prepared:
    """An environment, its setup, and a semaphore for the rollouts that may run at once."""

    def __init__(self, environment: Environment) -> None:
        self.setup = asyncio.ensure_future(environment.setup())
        self.places = asyncio.Semaphore(environment.at_once or sys.maxsize)


_prepared: dict[Environment, _Prepared] = {}  # of this worker


@asynccontextmanager
async def _place(environment: Environment) -> AsyncIterator[None]:
    """Hold a place for a rollout, after the environment's setup. The wait has no time limit."""
    prepared = _prepared.get(environment)
    if prepared is None or (prepared.setup.done() and (prepared.setup.cancelled() or prepared.setup.exception())):
        prepared = _prepared[environment] = _Prepared(environment)
    async with prepared.places:
        await asyncio.shield(prepared.setup)
        yield


async def tear_down() -> None:
    """Tear down the environments of this worker."""
    for environment in _prepared:
        with suppress(Exception):  # the process ends anyway
            await environment.teardown()


def known_error(error: BaseException) -> ArealError:
    """Convert an error to one that every process of a run knows.
    Errors from outside this package are user bugs."""
    if isinstance(error, ArealError):  # other processes may not know a user's own class
        return error if type(error).__module__ == ArealError.__module__ else RewardError(str(error))
    return VerifierError(verdicts.error_text("the environment", error))


# Called for rollouts that ignore their cancellation. In a worker it ends the process.
on_uncancelled: Callable[[RewardTimeoutError], object] = logging.getLogger(__name__).error


# -- time limits -------------------------------------------------------------------------------------------------------


class _Running:
    """A rollout, and the time limit of each of its awaits."""

    def __init__(self, failures: list[str], limit_s: float) -> None:
        self.failures = failures  # messages of the group's verifier failures
        self.unlimited = 0  # current awaits with a time limit elsewhere, such as calls of the policy
        self._limit_s = limit_s
        self._scope: asyncio.Timeout | None = None

    async def limited(self, rollout: Coroutine[Any, Any, Rollout]) -> Rollout:
        """Await the rollout. Raises RewardTimeoutError if one await takes longer than the limit."""
        try:
            async with asyncio.timeout(None) as scope:
                self._scope = scope
                return await rollout
        except TimeoutError as error:
            if not scope.expired():
                raise  # raised by the environment itself
            why = verdicts.timeout_text(self._limit_s)
            raise RewardTimeoutError(verdicts.hang_text(verdicts.stack_of(error), why)) from None
        finally:
            self._scope = None

    def start_limit(self) -> None:
        if self._scope is not None and not self._scope.expired():
            now = asyncio.get_running_loop().time()
            self._scope.reschedule(None if self.unlimited else now + self._limit_s)


# Set in the context of a rollout. Elsewhere a default that nobody reads.
_current: ContextVar[_Running] = ContextVar("current", default=_Running([], 0.0))  # noqa: B039


def step_ended() -> None:
    """Start the time limit of the current await of this context's rollout."""
    _current.get().start_limit()


@contextmanager
def unlimited() -> Iterator[None]:
    """Suspend the time limit of this context's rollout inside the block."""
    running = _current.get()
    running.unlimited += 1
    try:
        yield
    finally:
        running.unlimited -= 1


verdicts.unlimited = unlimited  # verdicts have their own time limit


def note_failure(failure: str) -> None:
    """Record a verifier failure for the group of this context."""
    _current.get().failures.append(failure)


# -- calls of the policy -----------------------------------------------------------------------------------------------

_Asked = tuple[tuple[int, ...], int, tuple[int, ...]]  # prompt tokens, max_tokens and stop tokens of a call


class _Calls:
    """The policy calls of a group's rollouts. Their completions arrive from outside, in any order."""

    def __init__(self, request: Callable[[Requests], None]) -> None:
        self._request = request
        self._waiting: dict[tuple[int, int], asyncio.Future[Completion]] = {}  # by request and index
        self._opening: dict[int, asyncio.Future[Completion]] = {}  # of rollouts that have not called the policy yet
        self._new: dict[_Asked, list[tuple[tuple[int, int], asyncio.Future[Completion]]]] = {}
        self._requests = 0  # number of requests so far
        self.sampled_tokens = 0

    def open(self, n: int) -> None:
        """Register the opening request, sent before the n rollouts call for their first turns."""
        loop = asyncio.get_running_loop()
        self._opening = {rollout: loop.create_future() for rollout in range(n)}
        self._waiting = {(0, rollout): future for rollout, future in self._opening.items()}
        self._requests = 1

    async def complete(
        self, rollout: int, call: int, token_ids: tuple[int, ...], max_tokens: int, stop: tuple[int, ...]
    ) -> Completion:
        if (future := self._opening.pop(rollout, None)) is None:
            loop = asyncio.get_running_loop()
            if not self._new:
                loop.call_soon(self._send)  # after all rollouts that can run now have called
            future = loop.create_future()
            self._new.setdefault((token_ids, max_tokens, stop), []).append(((rollout, call), future))
        with unlimited():
            return await future

    def deliver(self, arrivals: Sequence[Arrival], completions: Sequence[Completion]) -> None:
        for one, completion in zip(arrivals, completions, strict=True):
            self.sampled_tokens += len(completion.token_ids)
            future = self._waiting.pop((one.request, one.index))
            if not future.cancelled():  # else the rollout has abandoned the call
                future.set_result(completion)

    def _send(self) -> None:
        """Request completions for the new calls: one request for calls of equal prompt, limit and stop tokens."""
        new, self._new = self._new, {}
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
        if requests:
            self._request(tuple(requests))
