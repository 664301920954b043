"""Record a rollout's token sequences call by call, and check the rollout at its end."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from areal_core.config.groups import TaskConfig
from areal_core.errors import RewardError, RolloutLimitError
from areal_core.types import Completion, Outcome, Prompt, Rollout, Segment, Trajectory


class Complete(Protocol):
    """Callable that returns the completion of one call of the rollout."""

    def __call__(
        self, call: int, token_ids: tuple[int, ...], max_tokens: int, stop: tuple[int, ...]
    ) -> Awaitable[Completion]: ...


@dataclass(eq=False)
class _Sequence:
    tokens: tuple[int, ...]  # all tokens so far, with which the sequence's next call must begin
    segments: list[Segment]
    waiting: bool = True  # a call is waiting for its completion


@dataclass
class RecordingPolicy:
    """Implements `environments.Policy` for one rollout, and records its calls."""

    task: Prompt
    limits: TaskConfig
    max_turns: int
    opens: bool  # the first call is the group's opening request
    complete: Complete
    _sequences: list[_Sequence] = field(default_factory=list[_Sequence])
    _calls: list[Completion | None] = field(default_factory=list[Completion | None])
    _earned: dict[int, float] = field(default_factory=dict[int, float])  # rewards by call
    _cut_off: bool = False  # the last completion reached its token limit
    begun: bool = False  # the rollout has its place and runs
    ended: Outcome | None = None  # outcome of a rollout that is ended early

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        trained: bool = True,
    ) -> Completion:
        text = tuple(map(int, token_ids))  # Python's int, not numpy's
        sequence = self._extended(text)
        room = self._room(text, sequence)
        if len(self._calls) >= self.max_turns:
            raise RolloutLimitError(f"environment: the rollout has used all its {self.max_turns} turns (max_turns)")
        if not text or room < 1:
            self._cut_off = True
            raise RolloutLimitError(
                f"environment: {len(text)} tokens leave no room for a completion "
                "(task.max_prompt_tokens, task.max_new_tokens)"
            )
        limit = room if max_tokens is None else int(max_tokens)
        if not 1 <= limit <= room:
            raise RewardError(f"environment: max_tokens must be from 1 to {room} (task.max_new_tokens), got {limit}")
        opening = self.task.token_ids, self.limits.max_new_tokens, ()
        if self.opens and not self._calls and (text, limit, tuple(stop)) != opening:
            raise RewardError(
                "environment: with opens_with_prompt the first turn must sample from task.token_ids, without "
                "max_tokens or stop"
            )
        call = len(self._calls)
        self._calls.append(None)
        if new := sequence is None:
            sequence = _Sequence(text, [_given(text)])
            self._sequences.append(sequence)
        sequence.waiting = True
        try:
            completion = await self.complete(call, text, limit, tuple(map(int, stop)))
        except BaseException:
            sequence.waiting = False
            if new:
                self._sequences.remove(sequence)
            raise
        if message := text[len(sequence.tokens) :]:
            sequence.segments.append(_given(message))
        sequence.segments.append(_sampled(completion, call, trained))
        sequence.tokens, sequence.waiting = (*text, *completion.token_ids.tolist()), False
        self._calls[call], self._cut_off = completion, completion.finish_reason == "length"
        return completion

    @property
    def waits(self) -> bool:
        """Whether a call is waiting for its completion."""
        return any(sequence.waiting for sequence in self._sequences)

    def room(self, token_ids: Sequence[int]) -> int:
        text = tuple(map(int, token_ids))
        return self._room(text, self._extended(text))

    def earn(self, completion: Completion, reward: float) -> None:
        for call, known in enumerate(self._calls):
            if known is completion:
                self._earned[call] = self._earned.get(call, 0.0) + number("the reward of a turn", reward)
                return
        raise RewardError("environment: earn: the completion must be one of this rollout")

    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(
            Trajectory(
                segments=tuple(replace(each, reward=self._earned.get(each.call, 0.0)) for each in sequence.segments)
            )
            for sequence in self._sequences
            if len(sequence.segments) > 1
        )

    def finished(self, rollout: object) -> Rollout:
        """Return the environment's rollout with its sequences. Raises RewardError if it can't be trained on."""
        if not isinstance(rollout, Rollout):
            raise RewardError(f"environment: rollout must return a Rollout, got {type(rollout).__name__}")
        its = rollout.trajectories
        trajectories = self.trajectories() if its is None else tuple(its)
        if not trajectories and rollout.reward is not None:
            raise RewardError("environment: a rollout with a reward must hold tokens sampled by the policy")
        if its is not None:
            self._check(trajectories)
        truncated = self._cut_off if rollout.truncated is None else bool(rollout.truncated)
        return replace(rollout, trajectories=trajectories, truncated=truncated)

    def _room(self, text: tuple[int, ...], sequence: _Sequence | None) -> int:
        """Number of tokens that may follow `text`, which extends `sequence` or begins a new one."""
        prompt = len(text) if sequence is None else len(sequence.segments[0].token_ids)
        return min(prompt, self.limits.max_prompt_tokens) + self.limits.max_new_tokens - len(text)

    def _extended(self, text: tuple[int, ...]) -> _Sequence | None:
        """The longest sequence that `text` extends; None if there is none."""
        begun = [each for each in self._sequences if not each.waiting and each.tokens == text[: len(each.tokens)]]
        return max(begun, key=lambda each: len(each.tokens), default=None)

    def _check(self, trajectories: Sequence[Trajectory]) -> None:
        calls: set[int] = set()
        for trajectory in trajectories:
            prompt, *rest = trajectory.segments or (None,)
            if prompt is None or not len(prompt.token_ids) or prompt.call >= 0:
                raise RewardError("environment: a trajectory's first segment must be its prompt")
            for segment in trajectory.segments:
                self._check_segment(segment)
                if segment.call in calls:
                    raise RewardError(
                        f"environment: call {segment.call} is in two segments; make the second one context (call=-1)"
                    )
                calls |= {segment.call} - {-1}
            after, new = sum(len(segment.token_ids) for segment in rest), self.limits.max_new_tokens
            if after > new or after + len(prompt.token_ids) > self.limits.max_prompt_tokens + new:
                raise RewardError(
                    f"environment: a trajectory has {len(prompt.token_ids)} + {after} tokens, more than "
                    "task.max_prompt_tokens and task.max_new_tokens allow"
                )
            if all(segment.call < 0 for segment in rest):
                raise RewardError("environment: a trajectory must hold tokens sampled by the policy")

    def _check_segment(self, segment: Segment) -> None:
        for name in ("loss_mask", "logprobs", "versions"):
            if (found := len(getattr(segment, name))) != len(segment.token_ids):
                raise RewardError(
                    f"environment: {name} of a segment must have {len(segment.token_ids)} entries, one per token, "
                    f"got {found}"
                )
        if segment.call < 0:
            if np.any(segment.loss_mask) or (np.asarray(segment.versions) >= 0).any():
                raise RewardError("environment: loss_mask must be False where the policy did not sample")
            return
        known = self._calls[segment.call] if segment.call < len(self._calls) else None
        if known is None or not all(
            np.array_equal(getattr(known, name), getattr(segment, name))
            for name in ("token_ids", "logprobs", "versions")
        ):
            raise RewardError(
                f"environment: call {segment.call} of this rollout sampled other tokens; take segments from "
                "this rollout's policy.trajectories()"
            )


def number(what: str, value: object, otherwise: str = "") -> float:
    """Convert any number to a finite Python float. Raises RewardError, which names `what`."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = np.nan
    if not np.isfinite(found):
        raise RewardError(f"environment: {what} must be a finite number{otherwise}, got {value!r:.200}")
    return found


def _given(token_ids: Sequence[int]) -> Segment:
    """Build a segment that the policy did not sample: a prompt, or a message of the environment."""
    length = len(token_ids)
    return Segment(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.zeros(length, np.bool_),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
    )


def _sampled(completion: Completion, call: int, trained: bool) -> Segment:
    shown: Any = {name: getattr(completion, name) for name in ("token_ids", "logprobs", "versions")}
    return Segment(loss_mask=np.full(len(completion.token_ids), trained, np.bool_), call=call, **shown)
