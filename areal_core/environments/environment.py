"""Environments: coroutines that turn a task into a rollout with a reward.

    rollout(task, policy) -> one or more token sequences, a reward

A group is n concurrent rollouts of one task. An environment builds every prompt itself, including the first. The
policy records prompts and completions, so that nothing is tokenised twice. Environments run in the workers of
`areal_core.rewards`. An environment that blocks or kills its worker costs little more than its own group. Rollouts
start again when their worker is lost, so side effects must be idempotent.

This module has two environments: one completion a rollout, and a second attempt after an incorrect first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from areal_core.config.groups import EnvironmentConfig, TaskConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.verdicts import Judge, Verdict, Verifier
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Completion, Outcome, Prompt, Rollout, Trajectory

__all__ = ["EnvContext", "Environment", "Policy", "Verdict", "Verifier"]


class Policy(Protocol):
    """The policy as one rollout sees it: tokens in; tokens with log-probabilities and versions out."""

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        trained: bool = True,
    ) -> Completion:
        """Sample a completion of `token_ids` with at most `max_tokens` tokens; None: as many as `room` allows.

        The completion ends with an end token of the model or with one of `stop`, which it keeps. With `trained` False
        it stays out of the loss.

        The call is recorded. If `token_ids` begin with a recorded sequence, the call continues this sequence, and the
        tokens between are the environment's message. Otherwise `token_ids` are the prompt of a new sequence. Several
        calls may wait at the same time; each returns when its own completion has ended.

        Raises RolloutLimitError if there is no room, or no turn left (`Environment.max_turns`). If the environment does
        not catch it, the rollout ends and is incorrect. Raises RewardError if `max_tokens` exceeds the room.
        """
        ...

    def room(self, token_ids: Sequence[int]) -> int:
        """Number of tokens that may follow `token_ids`.
        A sequence has at most task.max_new_tokens after its prompt, including the environment's messages. With its
        prompt it has at most task.max_prompt_tokens + task.max_new_tokens."""
        ...

    def earn(self, completion: Completion, reward: float) -> None:
        """Add to the reward of the turn that sampled `completion`, for algorithm.credit=turn."""
        ...

    def trajectories(self) -> tuple[Trajectory, ...]:
        """The sequences recorded so far, in the order of their first turns."""
        ...


class Environment(ABC):
    """One kind of rollout. Registered by name in `environments.registry`, or given by import path."""

    opens_with_prompt: ClassVar[bool] = False
    """Whether the first turn of every rollout samples from `task.token_ids`, without `max_tokens` or `stop`. The
    controller then requests these turns at admission, and servers compute the prompt once."""

    max_turns: ClassVar[int] = 16
    """Most calls of `Policy.sample` in one rollout; a further call exceeds the rollout's limit."""

    at_once: ClassVar[int | None] = None
    """Most rollouts that one worker runs at the same time; others queue. None: no limit."""

    def __init__(self, context: EnvContext) -> None:
        self.context = context

    async def setup(self) -> None:  # noqa: B027 - most have nothing to set up
        """Called in every worker before its first rollout."""

    async def teardown(self) -> None:  # noqa: B027
        """Called when a worker on the controller's machine ends in order. A killed worker does not call it."""

    @abstractmethod
    async def rollout(self, task: Prompt, policy: Policy) -> Rollout:
        """Make one attempt at a task.
        Return `Rollout(reward=None, outcome=Outcome.FAILED)` to leave it out of training. An exception fails the
        attempt of the whole group."""


@dataclass(frozen=True, kw_only=True)
class EnvContext:
    """The context passed to an environment's class: its settings, tokenizer and verifier."""

    environment: EnvironmentConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    tokenizer: Tokenizer
    dialogue: Dialogue
    verify: Verifier
    parts: Mapping[str, tuple[float, Verifier]] = field(default_factory=dict[str, tuple[float, Verifier]])
    # further reward functions of environment.rewards, by name, with their coefficients
    on_failure: Callable[[str], None] = lambda failure: None  # called with each verifier failure

    async def judge(self, task: Prompt, completion: Completion) -> Verdict:
        """Judge a completion, with the bonus from environment.rewards.
        A truncated completion is incorrect, and is not verified unless environment.verify_truncated is set. If a
        verifier or reward function fails, the verdict has no result. Raises RewardError if one of them does."""
        text, truncated = self.tokenizer.decode(completion.token_ids.tolist()), completion.finish_reason == "length"
        verdict = await Judge(self.environment, self.verify)(task, text, truncated=truncated)
        for name, (coefficient, function) in self.parts.items():
            if verdict.score is None:
                break
            judge = Judge(self.environment, function, f"environment.rewards {name}")
            part = await judge(task, text, truncated=truncated)
            if part.score is None:
                verdict = part
            else:
                metrics = {**verdict.metrics, **part.metrics, f"reward_part/{name}": part.score}
                verdict = replace(verdict, bonus=verdict.bonus + coefficient * part.score, metrics=metrics)
        if verdict.failure is not None:
            self.on_failure(verdict.failure)
        return verdict

    def scored(self, verdict: Verdict, **metrics: float) -> Rollout:
        """Build a rollout with the reward for this verdict and all recorded sequences.
        `metrics` become curves under environment/."""
        return Rollout(
            reward=None if verdict.score is None else self.reward(verdict.score) + verdict.bonus,
            outcome=verdict.outcome,
            answer=verdict.answer,
            metrics={**verdict.metrics, **{f"environment/{name}": value for name, value in metrics.items()}},
        )

    def reward(self, score: float) -> float:
        """Interpolate from algorithm.reward_incorrect (score 0) to algorithm.reward_correct (score 1)."""
        wrong, right = self.algorithm.reward_incorrect, self.algorithm.reward_correct
        return wrong + score * (right - wrong)


class SingleTurn(Environment):
    """One completion a rollout. `algorithm.truncated` decides whether to train on truncated ones."""

    opens_with_prompt = True
    max_turns = 1

    async def rollout(self, task: Prompt, policy: Policy) -> Rollout:
        completion = await policy.sample(task.token_ids)
        return self.context.scored(await self.context.judge(task, completion))


class TwoTurn(Environment):
    """prompt | first attempt | message | second attempt

    The first attempt stays in the trajectory and in the loss; the reward is the rollout's. A correct first attempt
    earns the full reward, a correct second one `environment.retry_score` of it. A truncated attempt is incorrect. If no
    room is left for a second attempt, the rollout ends."""

    opens_with_prompt = True
    max_turns = 2

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._message = context.environment.retry_message
        context.dialogue.message(self._message, ())  # raises if the message can't be encoded

    async def rollout(self, task: Prompt, policy: Policy) -> Rollout:
        first = await policy.sample(task.token_ids)
        verdict = await self.context.judge(task, first)
        if verdict.outcome is Outcome.CORRECT or verdict.score is None:
            return self.context.scored(verdict)
        message = self.context.dialogue.message(self._message, first.token_ids.tolist())
        text = (*task.token_ids, *first.token_ids.tolist(), *message)
        if policy.room(text) < 1:
            return self.context.scored(verdict)
        again = await self.context.judge(task, await policy.sample(text))
        if again.score is not None:
            score = max(verdict.score, self.context.environment.retry_score * again.score)
            again = replace(again, score=score)
        return self.context.scored(again)
