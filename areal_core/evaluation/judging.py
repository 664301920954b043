"""Verdicts of an evaluation: in reward workers, as those of rollouts are, which may hang or die."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from areal_core.config.schema import RunConfig
from areal_core.environments.registry import open_judge
from areal_core.environments.verdicts import Apart, Failures, Judge, Verdict
from areal_core.errors import RewardError, RewardTimeoutError, RewardWorkerError
from areal_core.rewards.pool import RewardPool
from areal_core.rewards.worker import judged_apart
from areal_core.types import Outcome, Prompt

_Completion = tuple[Prompt, str, bool]  # its problem, its text, and whether it ran into the length limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A message for a worker."""

    completions: Sequence[_Completion]
    apart: bool = False


class Judges:
    """The workers that judge one benchmark's completions. Make and close it as a RewardPool."""

    def __init__(self, config: RunConfig, workers: int) -> None:
        self._pool = RewardPool(workers, config.rollout.reward_timeout_s, function=functools.partial(_judged, config))
        self._failures = Failures(config.environment.max_no_result)

    async def __call__(self, problem: Prompt, completions: Sequence[tuple[str, bool]]) -> Sequence[Verdict]:
        """The verdicts, in order. Completions that cost a worker its process are judged again, each in a process of its
        own. Raises UserCodeError where too many have no result."""
        found = await self._verdicts([(problem, *each) for each in completions])
        outcomes = Counter(each.outcome for each in found)
        failure = next((each.failure for each in found if each.failure), None)
        self._failures.settled(outcomes, failure, truncated=sum(truncated for _, truncated in completions))
        return found

    async def close(self) -> None:
        await self._pool.close()

    async def _verdicts(self, completions: Sequence[_Completion]) -> Sequence[Verdict]:
        try:
            return await self._pool.ask(_Job(completions=completions))
        except (RewardTimeoutError, RewardWorkerError) as error:
            self._failures.failed_try(error)
        try:
            return await self._pool.ask(_Job(completions=completions, apart=True))
        except RewardError as failed:
            return [Verdict(Outcome.FAILED, None, failure=str(failed))] * len(completions)


async def _judged(config: RunConfig, job: _Job) -> list[Verdict]:
    judge = _judge(config, job.apart)
    return [await _verdict(judge, *completion) for completion in job.completions]


async def _verdict(judge: Judge, problem: Prompt, text: str, truncated: bool) -> Verdict:
    """A verifier that asks for another try gets one."""
    failure = None
    for _ in range(2):
        try:
            return await judge(problem, text, truncated=truncated)
        except RewardTimeoutError:
            raise
        except RewardError as error:
            failure = str(error)
    return Verdict(Outcome.FAILED, None, failure=failure)


@functools.lru_cache(maxsize=2)
def _judge(config: RunConfig, apart: bool) -> Judge:
    return open_judge(config, Apart(judged_apart, config) if apart else None)
