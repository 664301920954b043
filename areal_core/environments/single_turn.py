"""The single-turn environment: a prompt and n completions, each judged by the verifier."""

from __future__ import annotations

from areal_core.environments.environment import Policy, Setting, given, sampled
from areal_core.types import Completion, Prompt, Trajectory


class SingleTurn:
    """One completion a trajectory. Of one that was cut off, and so is wrong, the trainer decides whether it is left out
    of the loss too (algorithm.truncated)."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    async def rollout_group(self, task: Prompt, policy: Policy, n: int) -> list[Trajectory]:
        completions = await policy.sample(task.token_ids, n=n)
        return [self._judged(task, completion) for completion in completions]

    def _judged(self, task: Prompt, completion: Completion) -> Trajectory:
        verdict = self._setting.judge(task, completion)
        return Trajectory(
            segments=(given(task.token_ids), sampled(completion)),
            reward=self._setting.reward(verdict.score),
            outcome=verdict.outcome,
            truncated=completion.finish_reason == "length",
        )
