"""The single-turn environment: a prompt and n completions, each judged by the verifier."""

from __future__ import annotations

from areal_core.environments.environment import Policy, Setting, given, sampled
from areal_core.types import Completion, Prompt, Trajectory


class SingleTurn:
    """One completion a trajectory. One that was cut off is wrong, whatever it says; the trainer decides whether it is
    left out of the loss too (algorithm.truncated)."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    async def rollout_group(self, task: Prompt, policy: Policy, n: int) -> list[Trajectory]:
        completions = await policy.sample(task.token_ids, n=n)
        return [self._judged(task, completion) for completion in completions]

    def _judged(self, task: Prompt, completion: Completion) -> Trajectory:
        truncated = completion.finish_reason == "length"
        text = self._setting.tokenizer.decode(completion.token_ids.tolist())
        score = 0.0 if truncated else self._setting.verify(task, text)
        return Trajectory(
            segments=(given(task.token_ids), sampled(completion)),
            reward=self._setting.reward(score),
            correct=score == 1.0,
            truncated=truncated,
        )
