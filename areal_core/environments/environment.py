"""The environment: what happens between a prompt and its rewards, as a coroutine over a policy.

    rollout_group(task, policy, n) -> n trajectories of one or more segments, each with a reward

A single-turn environment samples n completions and judges them; others take further turns. Rollouts that run side by
side are resumed one by one, each as its completion ends. An environment runs in the workers of `areal_core.rewards`,
and one that blocks its worker or takes it down costs little more than its own group. It is started again from its first
completions when its worker is lost, so its side effects must bear repetition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from areal_core.config.schema import AlgorithmConfig, EnvironmentConfig, TaskConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.errors import RewardError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Completion, Outcome, Prompt, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier finds of a completion, and its score."""

    outcome: Outcome
    score: float | None  # from 0, wrong, to 1, right; None: there is no result
    answer: str | None = None  # what it has read as the completion's answer

    @classmethod
    def of(cls, outcome: Outcome, answer: str | None = None) -> Verdict:
        """1 for what is right, none where the verifier found no result, 0 for all else."""
        if outcome in (Outcome.TIMED_OUT, Outcome.FAILED):
            return cls(outcome, None, answer)
        return cls(outcome, float(outcome is Outcome.RIGHT), answer)


Verifier = Callable[[Prompt, str], "float | Verdict"]
"""The verdict on a completion's text, or its score alone, from 0, wrong, to 1, right. No result, which says nothing
about the completion, is a verdict without a score; or a RewardError, after which the whole group is tried again."""


def judge(verify: Verifier, tokenizer: Tokenizer, task: Prompt, completion: Completion) -> Verdict:
    """The verdict of a verifier, which may return a score alone. A completion that was cut off is wrong, whatever it
    says, and is not verified."""
    if completion.finish_reason == "length":
        return Verdict.of(Outcome.WRONG)
    found = verify(task, tokenizer.decode(completion.token_ids.tolist()))
    if isinstance(found, Verdict):
        return found
    return Verdict(Outcome.RIGHT if found == 1.0 else Outcome.WRONG, found)


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
class Setting:
    """What an environment is made from: its class is called with it."""

    environment: EnvironmentConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    tokenizer: Tokenizer
    dialogue: Dialogue
    verify: Verifier

    def judge(self, task: Prompt, completion: Completion) -> Verdict:
        """As the function `judge`; raises RewardError where there is no result and environment.no_result=try_again."""
        verdict = judge(self.verify, self.tokenizer, task, completion)
        if verdict.score is None and self.environment.no_result == "try_again":
            raise RewardError(f"the verifier found no result: {verdict.outcome}")
        return verdict

    def reward(self, score: float | None) -> float | None:
        """From algorithm.reward_wrong for a score of 0 to algorithm.reward_correct for 1; none for none."""
        if score is None:
            return None
        wrong, right = self.algorithm.reward_wrong, self.algorithm.reward_correct
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
