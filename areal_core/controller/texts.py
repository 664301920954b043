"""A few trajectories of a batch as people read them: made from its payloads when they are to be seen, kept nowhere
else than where that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_core.api.scored_groups import read_group_file
from areal_core.api.wire import version_spans
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import BatchManifest, Int32Array

GROUPS = 8
_OF_EACH = 2  # trajectories


def trajectory_table(
    manifest: BatchManifest, prompts: Sequence[str], folder: Path, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Rows of a table: trajectories of the oldest groups, whose prompts are `prompts`. `folder` holds the segments.
    Raises OSError, and StorageError for a payload that is not what was stored."""
    rows: list[dict[str, Any]] = []
    for group, prompt in zip(manifest.groups, prompts, strict=False):
        payload = read_group_file(folder, group, range(min(_OF_EACH, len(group.lengths))))
        end = 0
        for length, reward in zip(payload.lengths.tolist(), group.rewards, strict=False):
            start, end = end, end + length
            rows.append(
                {
                    "step": manifest.step,
                    "prompt": prompt,
                    "completion": tokenizer.decode(payload.tokens[start:end].tolist()),
                    "reward": reward,
                    "versions": _spans(payload.versions[start:end]),
                }
            )
    return rows


def _spans(versions: Int32Array) -> str:
    """Per-token versions for people: "3:0-40 4:40-77"; tokens of the environment are left out."""
    return " ".join(f"{version}:{start}-{end}" for version, start, end in version_spans(versions) if version >= 0)
