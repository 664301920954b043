"""Verdicts of an evaluation: in reward workers, as those of rollouts are, which may hang or die."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_core.config.schema import RunConfig
from areal_core.environments import verdicts
from areal_core.environments.registry import open_judge
from areal_core.environments.verdicts import Judge, Verdict
from areal_core.errors import RewardError, RewardTimeoutError, RewardWorkerError
from areal_core.rewards import apart
from areal_core.rewards.pool import RewardPool
from areal_core.rollout.failures import Failures
from areal_core.types import Outcome, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Completions of one problem: their texts, and whether they ran into the length limit."""

    problem: Prompt
    completions: tuple[tuple[str, bool], ...]
    apart: bool = False


class Judges:
    """The workers that judge one benchmark's completions. Make and close it as a RewardPool."""

    def __init__(self, config: RunConfig, workers: int) -> None:
        self._pool = RewardPool(workers, config.rollout.reward_timeout_s, function=functools.partial(_judged, config))
        self._failures = Failures(config.environment.max_no_result)

    async def __call__(self, problem: Prompt, completions: Sequence[tuple[str, bool]]) -> list[Verdict]:
        """The verdicts, in order. Completions that cost a worker its process are judged again, each in a process of its
        own. Raises UserCodeError where too many have no result."""
        job = _Job(problem=problem, completions=tuple(completions))
        try:
            found, _ = await self._pool.ask(job)
        except (RewardTimeoutError, RewardWorkerError) as error:
            self._failures.failed_try(error)
            try:
                found, _ = await self._pool.ask(replace(job, apart=True))
            except RewardError as failed:
                found = [Verdict(Outcome.FAILED, None, failure=str(failed))] * len(completions)
        outcomes = Counter(each.outcome for each in found)
        failure = next((each.failure for each in found if each.failure), None)
        self._failures.settled(outcomes, failure, truncated=sum(truncated for _, truncated in completions))
        return found

    async def close(self) -> None:
        await self._pool.close()


def _judged(config: RunConfig, job: _Job) -> list[Verdict]:
    judge = _judge(config)
    with verdicts.apart(functools.partial(apart.judge, config) if job.apart else None):
        return [_verdict(judge, job.problem, *completion) for completion in job.completions]


def _verdict(judge: Judge, problem: Prompt, text: str, truncated: bool) -> Verdict:
    """A verifier that asks for another try gets one."""
    failure = None
    for _ in range(2):
        try:
            return judge(problem, text, truncated=truncated)
        except RewardError as error:
            failure = str(error)
    return Verdict(Outcome.FAILED, None, failure=failure)


_judge = functools.lru_cache(maxsize=1)(open_judge)
