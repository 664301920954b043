"""A batch's trajectories as people read them, from the segments that hold them."""

from pathlib import Path

import numpy as np
import pytest

from areal_core.api.scored_groups import pack_group
from areal_core.controller.payloads import trajectory_table
from areal_core.errors import StorageError
from areal_core.types import BatchGroup, BatchManifest, GroupPayload
from tests.support.policies import END, TOKENIZER


def put(folder: Path, *texts: str) -> BatchGroup:
    """A group of completions in a segment of its own; the first was interrupted by an update after two tokens, and the
    environment said its last one."""
    tokens = [(*TOKENIZER.encode(text), END) for text in texts]
    versions = np.concatenate([np.full(len(each), 4, np.int32) for each in tokens])
    versions[2:] = 5
    versions[len(tokens[0]) - 1] = -1
    payload = GroupPayload(
        prompt_tokens=np.array(TOKENIZER.encode("1-1="), np.int32),
        lengths=np.array([len(each) for each in tokens], np.int32),
        tokens=np.array([token for each in tokens for token in each], np.int32),
        loss_mask=versions >= 0,
        logprobs=np.zeros(len(versions), np.float32),
        versions=versions,
        truncated=np.zeros(len(texts), np.bool_),
    )
    data, checksums = pack_group(payload)
    (folder / "1.bin").write_bytes(b"before" + data)
    return BatchGroup(
        group_id=1,
        lengths=tuple(payload.lengths.tolist()),
        rewards=(1.0, None, 0.0)[: len(texts)],
        truncated=(False,) * len(texts),
        ready_version=5,
        prompt_tokens=len(payload.prompt_tokens),
        checksums=checksums,
        segment="1",
        start=6,
    )


def test_two_trajectories_of_each_of_the_oldest_groups(tmp_path: Path) -> None:
    group = put(tmp_path, "1-1=0#0", "#2", "#3")
    rows = trajectory_table(BatchManifest(step=7, groups=(group,) * 3), ["1-1=", "again"], tmp_path, TOKENIZER)
    assert [row["prompt"] for row in rows] == ["1-1=", "1-1=", "again", "again"]
    first = {"step": 7, "prompt": "1-1=", "completion": "1-1=0#0", "reward": 1.0, "versions": "4:0-2 5:2-7"}
    assert rows[:2] == [first, first | {"completion": "#2", "reward": None, "versions": "5:0-3"}]
    data = bytearray((tmp_path / "1.bin").read_bytes())
    data[6] ^= 1  # of its prompt
    (tmp_path / "1.bin").write_bytes(data)
    with pytest.raises(StorageError, match="not what was stored"):
        trajectory_table(BatchManifest(step=1, groups=(group,)), ["1-1="], tmp_path, TOKENIZER)
