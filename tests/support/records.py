"""Records of groups and of scores, of which a test gives what it is about."""

from __future__ import annotations

from typing import Any

from areal_core.types import BatchGroup, Evaluation, GroupPayload, GroupSummary, Outcome


def summary(**fields: Any) -> GroupSummary:
    """Of two completions, one of them right, sampled by version 0."""
    given: dict[str, Any] = {"lengths": (1, 1), "rewards": (1.0, 0.0), "tokens": 2, "min_version": 0, "max_version": 0}
    given |= {"outcomes": {Outcome.CORRECT: 1}, "truncated": (False, False)}
    return GroupSummary(**given | fields)


def evaluation(version: int, accuracy: float, digest: str = "") -> Evaluation:
    numbers = {"prompts": 4, "no_result": 0, "mean_tokens": 1.0, "wall_s": 1.0}
    return Evaluation(version=version, digest=digest, accuracy=accuracy, **numbers)  # type: ignore[arg-type]


def batch_group(payload: GroupPayload, checksums: tuple[int, ...], **fields: Any) -> BatchGroup:
    """The row of a group whose payload begins at byte 6 of a segment."""
    lengths = tuple(payload.lengths.tolist())
    given = {"rewards": (0.0,) * len(lengths), "truncated": tuple(payload.truncated.tolist()), "group_id": 1}
    given |= {"ready_version": 0, "prompt_tokens": len(payload.prompt_tokens), "segment": "000001-000001", "start": 6}
    return BatchGroup(lengths=lengths, checksums=checksums, **given | fields)
