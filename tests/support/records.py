"""Records of groups and of scores, of which a test gives what it is about. A group has one prompt, and one sequence a
rollout, unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_core.algorithm.advantages import Credit
from areal_core.types import BatchGroup, Evaluation, GroupPayload, GroupSummary, Int32Array, Outcome


def group_payload(prompt: Int32Array, lengths: Int32Array, **columns: Any) -> GroupPayload:
    """All tokens are loss tokens of version 0, and no rollout is cut off, unless `columns` say so."""
    total = int(lengths.sum())
    given: dict[str, Any] = {"loss_mask": np.ones(total, np.bool_), "versions": np.zeros(total, np.int32)}
    given |= {"truncated": np.zeros(len(lengths), np.bool_), "prompt_of": np.zeros(len(lengths), np.int32)}
    given |= {"prompts": (prompt,)} | columns
    ends = np.cumsum(lengths)
    loss_tokens = [int(given["loss_mask"][end - length : end].sum()) for length, end in zip(lengths, ends, strict=True)]
    return GroupPayload(lengths=lengths, **{"loss_tokens": np.array(loss_tokens, np.int32)} | given)


def packed(lengths: Sequence[int], prompt: int = 1, **fields: Any) -> dict[str, Any]:
    """The fields of a PackedGroup whose sequences have these lengths; every second one is correct."""
    count = len(lengths)
    given: dict[str, Any] = {"lengths": tuple(lengths), "loss_tokens": tuple(lengths), "tokens": sum(lengths)}
    given |= {"prompts": (prompt,), "prompt_of": (0,) * count, "rollout_of": tuple(range(count))}
    given |= {"rewards": ((1.0, 0.0) * count)[:count], "truncated": (False,) * count}
    return given | fields


def summary(**fields: Any) -> GroupSummary:
    """Of two completions, one of them right, sampled by version 0."""
    given = packed(fields.pop("lengths", (1, 1))) | {"min_version": 0, "max_version": 0}
    return GroupSummary(**given | {"outcomes": {Outcome.CORRECT: 1}} | fields)


def evaluation(version: int, accuracy: float, digest: str = "") -> Evaluation:
    numbers = {"prompts": 4, "no_result": 0, "mean_tokens": 1.0, "wall_s": 1.0}
    return Evaluation(version=version, digest=digest, accuracy=accuracy, **numbers)  # type: ignore[arg-type]


def batch_group(payload: GroupPayload, checksums: tuple[int, ...], **fields: Any) -> BatchGroup:
    """The row of a group whose payload begins at byte 6 of a segment."""
    lengths = payload.lengths.tolist()
    given = packed(lengths, len(payload.prompts[0]), rewards=(0.0,) * len(lengths), truncated=tuple(payload.truncated))
    given |= {"loss_tokens": tuple(payload.loss_tokens.tolist()), "checksums": checksums, "group_id": 1}
    given |= {"ready_version": 0, "segment": "000001-000001", "start": 6}
    return BatchGroup(**given | fields)


def credits_of(advantages: Any, payloads: Sequence[GroupPayload]) -> list[Credit]:
    """One advantage for each completion, [P, G]."""
    return [
        Credit(np.arange(len(its)), group.lengths.astype(np.int64), np.asarray(its, np.float64))
        for its, group in zip(advantages, payloads, strict=True)
    ]
