"""The single-turn environment: a prompt and n completions, each judged by the verifier."""

from __future__ import annotations

from areal_core.environments.environment import EnvContext, Policy, given, sampled, side_by_side
from areal_core.types import Prompt, Trajectory


class SingleTurn:
    """One completion a trajectory. Of one that was cut off, and so is wrong, the trainer decides whether it is left out
    of the loss too (algorithm.truncated)."""

    def __init__(self, context: EnvContext) -> None:
        self._setting = context

    async def rollout_group(self, task: Prompt, policy: Policy, n: int) -> list[Trajectory]:
        return await side_by_side(self._rollout(task, policy) for _ in range(n))

    async def _rollout(self, task: Prompt, policy: Policy) -> Trajectory:
        [completion] = await policy.sample(task.token_ids)
        verdict = self._setting.judge(task, completion)
        return self._setting.trajectory([given(task.token_ids), sampled(completion)], verdict, completion)
