"""Convert the rollouts of a group for the trainer: packed sequences and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_core.algorithm.advantages import discounted
from areal_core.api.scored_groups import ScoredGroup, pack_group
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.errors import GenerationError, RewardError
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.record import number
from areal_core.types import (
    GroupPayload,
    GroupSummary,
    Outcome,
    Return,
    Rollout,
    Sample,
    Trajectory,
)


def scored_group(
    rollouts: Sequence[Rollout], algorithm: AlgorithmConfig, *, sampled_tokens: int, metrics: dict[str, list[float]]
) -> ScoredGroup:
    """Pack rollouts and build their summary.

    `sampled_tokens` counts all calls of the rollouts. `metrics` holds further numbers of the group, by curve name.
    Raises RewardError if no rollout has a result, or for invalid numbers. Raises GenerationError if all were cut."""
    rewards = [
        None if rollout.reward is None else number("a reward", rollout.reward, " or None") for rollout in rollouts
    ]
    if all(rollout.outcome is Outcome.CUT for rollout in rollouts):
        raise GenerationError("rollout.deadline_s: no rollout of the group finished in time")
    if all(reward is None for reward in rewards):
        raise RewardError("the verifier found no result for any completion of the group")
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            metrics.setdefault(name, []).append(number(f"metric {name}", value))
    held = [(place, one) for place, rollout in enumerate(rollouts) for one in rollout.trajectories or ()]
    rests = [trajectory.segments[1:] for _, trajectory in held]
    rollout_of = [place for place, _ in held]
    lengths = [sum(len(segment.token_ids) for segment in rest) for rest in rests]
    prompts: dict[bytes, int] = {}
    beginnings = [np.asarray(trajectory.segments[0].token_ids, np.int32).tobytes() for _, trajectory in held]
    prompt_of = [prompts.setdefault(beginning, len(prompts)) for beginning in beginnings]

    def joined(field: str, kind: Any) -> Any:
        return np.concatenate([getattr(segment, field) for rest in rests for segment in rest]).astype(kind)

    judged = np.repeat([rewards[place] is not None for place in rollout_of], lengths)
    loss_mask = joined("loss_mask", np.bool_) & judged
    loss_tokens = np.bincount(np.repeat(rollout_of, lengths), loss_mask, len(rollouts)).astype(np.int32)
    truncated = np.array([bool(rollout.truncated) for rollout in rollouts], np.bool_)
    payload = GroupPayload(
        prompts=tuple(np.frombuffer(prompt, np.int32) for prompt in prompts),
        prompt_of=np.array(prompt_of, np.int32),
        lengths=np.array(lengths, np.int32),
        tokens=joined("token_ids", np.int32),
        loss_mask=loss_mask,
        logprobs=joined("logprobs", np.float32),
        versions=joined("versions", np.int32),
        truncated=truncated[rollout_of],
        loss_tokens=loss_tokens[rollout_of],
    )
    versions = payload.versions[payload.versions >= 0]
    packed, checksums = pack_group(payload)
    summary = GroupSummary(
        prompts=tuple(map(len, payload.prompts)),
        prompt_of=tuple(prompt_of),
        rollout_of=tuple(rollout_of),
        lengths=tuple(lengths),
        loss_tokens=tuple(loss_tokens.tolist()),
        rewards=tuple(rewards),
        truncated=tuple(truncated.tolist()),
        tokens=len(versions),
        returns=_returns(held, rewards, algorithm),
        checksums=checksums,
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        outcomes=dict(Counter(Outcome(rollout.outcome) for rollout in rollouts)),
        unused_tokens=sampled_tokens - len(versions),
        metrics={name: tuple(values) for name, values in metrics.items()},
    )
    return ScoredGroup(payload=packed, summary=summary)


def sample_of(rollout: Rollout, tokenizer: Tokenizer) -> Sample:
    """Convert a rollout to text."""
    first, *others = rollout.trajectories or (Trajectory(segments=()),)
    shown = [first.segments[1:], *(trajectory.segments for trajectory in others)]
    tokens = [np.concatenate([np.zeros(0, np.int32), *(segment.token_ids for segment in its)]) for its in shown]
    sampled = [segment for its in shown for segment in its if segment.call >= 0]
    return Sample(
        text="\n\n".join(tokenizer.decode(each.tolist()) for each in tokens),
        tokens=sum(len(segment.token_ids) for segment in sampled),
        truncated=bool(rollout.truncated),
        outcome=Outcome(rollout.outcome),
        score=rollout.reward,
        answer=rollout.answer,
        metrics={name: float(value) for name, value in rollout.metrics.items()},
    )


def _returns(
    held: Sequence[tuple[int, Trajectory]], rewards: Sequence[float | None], algorithm: AlgorithmConfig
) -> tuple[Return, ...]:
    """Returns that `algorithm.credit` assigns to parts of a rollout, with their sequences and ends."""
    if algorithm.credit == "rollout":
        return ()
    if algorithm.credit == "sequence":
        found = []
        for sequence, (place, trajectory) in enumerate(held):
            own = rewards[place]
            if own is not None and trajectory.reward is not None:
                own = number("the reward of a trajectory", trajectory.reward)
            found.append(Return(sequence, sum(len(each.token_ids) for each in trajectory.segments[1:]), own))
        return tuple(found)
    turns: list[tuple[int, int, int, int, float]] = []  # rollout, call, sequence, end, reward
    for sequence, (place, trajectory) in enumerate(held):
        end = 0
        for segment in trajectory.segments[1:]:
            end += len(segment.token_ids)
            if segment.call >= 0:
                turns.append((place, segment.call, sequence, end, number("the reward of a turn", segment.reward)))
        turns[-1] = (*turns[-1][:3], end, turns[-1][4])  # the last turn includes later tokens of the environment
    found: list[Return] = []
    for place, reward in enumerate(rewards):
        its = sorted(turn for turn in turns if turn[0] == place)
        earned = [turn[4] for turn in its]
        if its:
            earned[-1] += reward or 0.0
        values = discounted(earned, algorithm.discount)
        found += [
            Return(sequence, end, None if reward is None else value)
            for (_, _, sequence, end, _), value in zip(its, values, strict=True)
        ]
    return tuple(sorted(found, key=lambda part: part[:2]))
