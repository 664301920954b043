"""The environment: what happens between a prompt and its rewards, as a coroutine over a policy.

    rollout_group(task, policy, n) -> n trajectories of one or more segments, each with a reward

A single-turn environment samples n completions and judges them; others take further turns. Rollouts that run side by
side are resumed one by one, each as its completion ends. An environment runs in the workers of `areal_core.rewards`,
and one that blocks its worker or takes it down costs little more than its own group. It is started again from its first
completions when its worker is lost, so its side effects must bear repetition.

Two environments are here: one completion a trajectory, and a second try after an incorrect first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from areal_core.config.schema import AlgorithmConfig, EnvironmentConfig, TaskConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.verdicts import Judge, Verdict, Verifier
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Completion, Outcome, Prompt, Segment, Trajectory

__all__ = ["EnvContext", "Environment", "Policy", "Verdict", "Verifier", "given", "sampled", "side_by_side"]


class Policy(Protocol):
    """The policy as an environment sees it: tokens in; tokens with log-probabilities and versions out."""

    async def sample(self, token_ids: Sequence[int], *, n: int = 1, max_tokens: int | None = None) -> list[Completion]:
        """`n` completions of `token_ids`, of at most `max_tokens` tokens each; None: as many as the trajectory may
        still have (`room`). A group begins with completions of its task's prompt: the first `n` that are requested, at
        once or one after the other, are those. Several calls may wait at the same time; each returns when its own
        completions have ended."""
        ...

    def room(self, token_ids: Sequence[int]) -> int:
        """Tokens that may follow `token_ids`, which begin with the prompt: all that a trajectory holds after its
        prompt, the environment's messages included, is at most task.max_new_tokens."""
        ...


class Environment(Protocol):
    """One kind of rollout. Registered by name in `environments.registry`, or named by import path."""

    async def rollout_group(self, task: Prompt, policy: Policy, n: int) -> list[Trajectory]:
        """`n` trajectories that begin with the same segment, the prompt, and hold a sampled token each. Raises
        RewardError where a completion has no valid result."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvContext:
    """What an environment is made from: its class is called with it."""

    environment: EnvironmentConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    tokenizer: Tokenizer
    dialogue: Dialogue
    verify: Verifier
    on_failure: Callable[[str], None] = lambda failure: None  # told what a verifier has failed with

    def judge(self, task: Prompt, completion: Completion) -> Verdict:
        """The verdict on a completion. One that ran into the length limit is wrong, and is not verified unless
        environment.verify_truncated says so. A verifier that fails has no result. Raises RewardError where the
        verifier does."""
        text = self.tokenizer.decode(completion.token_ids.tolist())
        judge = Judge(self.environment, self.verify)
        verdict = judge(task, text, truncated=completion.finish_reason == "length")
        if verdict.failure is not None:
            self.on_failure(verdict.failure)
        return verdict

    def trajectory(
        self, segments: Sequence[Segment], verdict: Verdict, last: Completion, **metrics: float
    ) -> Trajectory:
        """A trajectory that ends with this completion, and with the reward for this verdict. `metrics` become curves
        under environment/."""
        return Trajectory(
            segments=tuple(segments),
            reward=self.reward(verdict.score),
            outcome=verdict.outcome,
            truncated=last.finish_reason == "length",
            metrics={f"environment/{name}": value for name, value in metrics.items()},
        )

    def reward(self, score: float | None) -> float | None:
        """From algorithm.reward_incorrect for a score of 0 to algorithm.reward_correct for 1; none for none."""
        if score is None:
            return None
        wrong, right = self.algorithm.reward_incorrect, self.algorithm.reward_correct
        return wrong + score * (right - wrong)


async def side_by_side(rollouts: Iterable[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """The trajectories of rollouts that do not wait for each other, in their order. The first failure ends them all."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def given(token_ids: Sequence[int]) -> Segment:
    """A segment that the policy did not sample: a prompt, or a message of the environment."""
    length = len(token_ids)
    return Segment(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.zeros(length, np.bool_),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
    )


def sampled(completion: Completion, *, trained: bool = True) -> Segment:
    """A completion as a segment; with `trained` False it stays in the trajectory and out of the loss."""
    return Segment(
        token_ids=completion.token_ids,
        loss_mask=np.full(len(completion.token_ids), trained, np.bool_),
        logprobs=completion.logprobs,
        versions=completion.versions,
    )


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


class TwoTurn(SingleTurn):
    """prompt | first try | message | second try

    The first try stays in the trajectory, and in the loss: the reward is the trajectory's.
    A trajectory that is right at the first try earns the full reward, at the second `environment.retry_score` of
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
