"""Verdicts of an evaluation: in reward workers, as those of rollouts are, which may hang or die."""

from __future__ import annotations

import asyncio
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

_TOGETHER = 32  # problems in a message, at most
_Completion = tuple[Prompt, str, bool]  # its problem, its text, and whether it ran into the length limit
_Problem = tuple[Sequence[_Completion], asyncio.Future[Sequence[Verdict]]]  # and who waits for the verdicts


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
        self._waiting = asyncio.Queue[_Problem]()
        self._asking = [asyncio.ensure_future(self._ask(workers)) for _ in range(workers)]

    async def __call__(self, problem: Prompt, completions: Sequence[tuple[str, bool]]) -> Sequence[Verdict]:
        """The verdicts, in order. Completions that cost a worker its process are judged again, each in a process of its
        own. Raises UserCodeError where too many have no result."""
        turn: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(([(problem, *each) for each in completions], turn))
        found = await turn
        outcomes = Counter(each.outcome for each in found)
        failure = next((each.failure for each in found if each.failure), None)
        self._failures.settled(outcomes, failure, truncated=sum(truncated for _, truncated in completions))
        return found

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await self._pool.close()

    async def _ask(self, workers: int) -> None:
        """Give a worker its share of the problems that wait: a message costs more than most verdicts."""
        while True:
            problems = [await self._waiting.get()]
            for _ in range(min(_TOGETHER - 1, self._waiting.qsize() // workers)):
                problems.append(self._waiting.get_nowait())
            try:
                found = iter(await self._verdicts(problems))
            except Exception as error:  # noqa: BLE001 - raised where they are waited for
                for _, turn in problems:
                    if not turn.done():
                        turn.set_exception(error)
                continue
            for completions, turn in problems:
                its = [next(found) for _ in completions]
                if not turn.done():
                    turn.set_result(its)

    async def _verdicts(self, problems: Sequence[_Problem]) -> Sequence[Verdict]:
        completions = [each for of_problem, _ in problems for each in of_problem]
        try:
            return (await self._pool.ask(_Job(completions=completions)))[0]
        except (RewardTimeoutError, RewardWorkerError) as error:
            if len(problems) > 1:  # one of them is at fault
                return [verdict for problem in problems for verdict in await self._verdicts([problem])]
            self._failures.failed_try(error)
        try:
            return (await self._pool.ask(_Job(completions=completions, apart=True)))[0]
        except RewardError as failed:
            return [Verdict(Outcome.FAILED, None, failure=str(failed))] * len(completions)


def _judged(config: RunConfig, job: _Job) -> list[Verdict]:
    judge = _judge(config, job.apart)
    return [_verdict(judge, *completion) for completion in job.completions]


def _verdict(judge: Judge, problem: Prompt, text: str, truncated: bool) -> Verdict:
    """A verifier that asks for another try gets one."""
    failure = None
    for _ in range(2):
        try:
            return judge(problem, text, truncated=truncated)
        except RewardError as error:
            failure = str(error)
    return Verdict(Outcome.FAILED, None, failure=failure)


@functools.lru_cache(maxsize=2)
def _judge(config: RunConfig, apart: bool) -> Judge:
    return open_judge(config, Apart(functools.partial(judged_apart, config)) if apart else None)
