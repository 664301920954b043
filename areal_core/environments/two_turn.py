"""The two-turn environment: a message follows a completion that is wrong, and the policy tries once more.

    prompt | first try | message | second try

The first try stays in the trajectory, and in the loss: the reward is the trajectory's.
"""

from __future__ import annotations

from areal_core.environments.environment import EnvContext, Policy, Verdict, given, sampled
from areal_core.environments.single_turn import SingleTurn
from areal_core.types import Outcome, Prompt, Trajectory


class TwoTurn(SingleTurn):
    """A trajectory that is right at the first try earns the full reward, at the second `environment.retry_score` of
    it. A try that was cut off is wrong, and where no room is left for another the trajectory ends there."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._message = context.environment.retry_message
        context.dialogue.message(self._message, ())  # raises for what can't be spelt

    async def _rollout(self, task: Prompt, policy: Policy) -> Trajectory:
        [first] = await policy.sample(task.token_ids)
        segments = [given(task.token_ids), sampled(first)]
        verdict = self._setting.judge(task, first)
        if verdict.outcome is Outcome.CORRECT or verdict.score is None:
            return self._setting.trajectory(segments, verdict, first)
        message = self._setting.dialogue.message(self._message, first.token_ids.tolist())
        text = (*task.token_ids, *first.token_ids.tolist(), *message)
        if policy.room(text) < 1:
            return self._setting.trajectory(segments, verdict, first)
        [second] = await policy.sample(text)
        again = self._setting.judge(task, second)
        if again.score is not None:
            score = max(verdict.score, self._setting.environment.retry_score * again.score)
            again = Verdict(again.outcome, score)
        return self._setting.trajectory([*segments, given(message), sampled(second)], again, second)
