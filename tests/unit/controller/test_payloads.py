"""Payloads in segments: what was stored is read, what is deleted goes by file, and damage is noticed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_core.api.scored_groups import pack_group
from areal_core.controller.payloads import DamagedPayloadError, PayloadStore, trajectory_table
from areal_core.errors import StorageError
from areal_core.types import BatchGroup, BatchManifest
from tests.support.policies import END, TOKENIZER
from tests.support.records import batch_group, group_payload


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "payloads"


@pytest.fixture
def store(folder: Path) -> Iterator[PayloadStore]:
    opened = PayloadStore(folder, 2, segment_bytes=8)
    yield opened
    opened.close()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


async def test_payloads_that_come_at_once_are_synced_together(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), fdatasync(fd)))
    payloads = [bytes([number]) for number in range(7)]
    places = await asyncio.gather(*map(store.append, payloads))
    assert [await store.read(place) for place in places] == payloads
    assert 1 <= len(synced) <= 2


async def test_restarted_controller_begins_a_segment_of_its_own(store: PayloadStore, folder: Path) -> None:
    place = await store.append(b"before")
    again, later = PayloadStore(folder, 2), PayloadStore(folder, 3)
    assert (await again.append(b"after")).segment == "000002-000002"
    assert (await later.append(b"after")).segment == "000003-000001"
    assert await again.read(place) == b"before"
    again.close()
    later.close()
    await store.seal()
    await store.keep(())
    once_more = PayloadStore(folder, 2)  # a kept checkpoint may share the deleted one, in the store under its name
    assert (await once_more.append(b"after")).segment > place.segment
    once_more.close()


async def test_only_sealed_segments_that_nobody_needs_are_deleted(store: PayloadStore, folder: Path) -> None:
    first, second, third = [await store.append(b"12345678") for _ in range(3)]
    await store.keep({second.segment})
    assert names(folder) == ["000002-000002.bin", "000002-000003.bin"]
    await store.seal()
    await store.keep({third.segment})
    assert names(folder) == ["000002-000003.bin"]
    assert await store.read(third) == b"12345678"
    with pytest.raises(DamagedPayloadError, match=r"can't read .*000002-000001\.bin: No such file"):
        await store.read(first)


async def test_a_segment_stays_while_the_place_of_its_payload_is_recorded_nowhere(store: PayloadStore) -> None:
    appended = asyncio.ensure_future(store.append(b"12345678"))
    await asyncio.sleep(0)
    store._thread.submit(store._seal).result()  # it is written by now, and its caller does not know yet
    keeping = asyncio.ensure_future(store.keep(()))
    place = await appended
    await keeping
    assert await store.read(place) == b"12345678"


@pytest.mark.parametrize("damage", ["flipped", "torn"])
async def test_damage_is_noticed(store: PayloadStore, folder: Path, damage: str) -> None:
    place, other = await store.append(b"12345"), await store.append(b"678")
    file = folder / f"{place.segment}.bin"
    file.write_bytes(b"12345679" if damage == "flipped" else b"123456")
    assert await store.read(place) == b"12345"
    with pytest.raises(
        DamagedPayloadError, match=r"000002-000001\.bin is damaged: the payload at byte 5 does not match"
    ):
        await store.read(other)


async def test_what_the_disk_refuses_is_one_line_and_the_next_is_stored(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await store.append(b"before")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(StorageError, match=r"^can't write .*payloads: No space left on device$"):
            await store.append(b"lost")
    place = await store.append(b"after")
    assert await store.read(place) == b"after"
    assert await store.read(kept) == b"before"


def put(folder: Path, *texts: str) -> BatchGroup:
    """A group of completions in a segment of its own; the first was interrupted by an update after two tokens, and the
    environment said its last one."""
    tokens = [(*TOKENIZER.encode(text), END) for text in texts]
    versions = np.concatenate([np.full(len(each), 4, np.int32) for each in tokens])
    versions[2:] = 5
    versions[len(tokens[0]) - 1] = -1
    payload = group_payload(
        np.array(TOKENIZER.encode("1-1="), np.int32),
        lengths=np.array([len(each) for each in tokens], np.int32),
        tokens=np.array([token for each in tokens for token in each], np.int32),
        loss_mask=versions >= 0,
        logprobs=np.zeros(len(versions), np.float32),
        versions=versions,
        truncated=np.zeros(len(texts), np.bool_),
    )
    data, checksums = pack_group(payload)
    (folder / "1.bin").write_bytes(b"before" + data)
    return batch_group(payload, checksums, rewards=(1.0, None, 0.0), segment="1")


def test_two_trajectories_of_each_of_the_oldest_groups(tmp_path: Path) -> None:
    group = put(tmp_path, "1-1=0#0", "#2", "#3")
    rows = trajectory_table(BatchManifest(step=7, groups=(group,) * 3), ["1-1=", "again"], tmp_path, TOKENIZER)
    assert [row["prompt"] for row in rows] == ["1-1=", "1-1=", "again", "again"]
    first = {"step": 7, "prompt": "1-1=", "completion": "1-1=0#0", "reward": 1.0, "versions": "4:0-2 5:2-7"}
    assert rows[:2] == [first, first | {"completion": "#2", "reward": None, "versions": "5:0-3"}]
    data = bytearray((tmp_path / "1.bin").read_bytes())
    data[6] ^= 1  # of its prompt
    (tmp_path / "1.bin").write_bytes(data)
    with pytest.raises(StorageError, match="its length or CRC-32 does not match"):
        trajectory_table(BatchManifest(step=1, groups=(group,)), ["1-1="], tmp_path, TOKENIZER)
