"""The two-turn environment: a message follows a completion that is wrong, and the policy tries once more.

    prompt | first try | message | second try

The first try stays in the trajectory, and in the loss: the reward is the trajectory's.
"""

from __future__ import annotations

import asyncio

from areal_core.environments.environment import Policy, Setting, given, sampled
from areal_core.types import Completion, Prompt, Segment, Trajectory


class TwoTurn:
    """A trajectory that is right at the first try earns the full reward, at the second `environment.retry_score` of
    it. A try that was cut off is wrong, and where no room is left for another the trajectory ends there."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._message = setting.tokenizer.encode(setting.environment.retry_message)

    async def rollout_group(self, task: Prompt, policy: Policy, n: int) -> list[Trajectory]:
        first = await policy.sample(task.token_ids, n=n)
        return list(await asyncio.gather(*(self._trajectory(task, policy, completion) for completion in first)))

    async def _trajectory(self, task: Prompt, policy: Policy, first: Completion) -> Trajectory:
        segments = [given(task.token_ids), sampled(first)]
        score = self._score(task, first)
        if score == 1.0:
            return self._ended(segments, score, first)
        text = (*task.token_ids, *first.token_ids.tolist(), *self._message)
        if policy.room(text) < 1:
            return self._ended(segments, score, first)
        [second] = await policy.sample(text)
        again = self._score(task, second)
        return self._ended(
            [*segments, given(self._message), sampled(second)],
            max(score, self._setting.environment.retry_score * again),
            second,
            correct=again == 1.0,
        )

    def _score(self, task: Prompt, completion: Completion) -> float:
        if completion.finish_reason == "length":
            return 0.0
        return self._setting.verify(task, self._setting.tokenizer.decode(completion.token_ids.tolist()))

    def _ended(
        self, segments: list[Segment], score: float, last: Completion, *, correct: bool | None = None
    ) -> Trajectory:
        return Trajectory(
            segments=tuple(segments),
            reward=self._setting.reward(score),
            correct=score == 1.0 if correct is None else correct,
            truncated=last.finish_reason == "length",
        )
