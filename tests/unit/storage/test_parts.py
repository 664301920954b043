"""Parts of a checkpoint's tensors: read without the rest, and checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_core.models.tensorfile import write_tensors
from areal_core.storage import checkpoint
from areal_core.storage.checkpoint import CheckpointInfo
from areal_core.storage.objects import DamagedError, Storage
from areal_core.storage.parts import read_tensors

BLOCK = 256
ARRAYS = {
    "a": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b": np.arange(7, dtype=np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "rng": np.arange(200, dtype=np.uint8),
}


class Stored:
    def __init__(self, folder: Path) -> None:
        self.store = Storage.open(str(folder / "store"))
        write_tensors(folder / "x", ARRAYS)
        checkpoint.save(self.store, 3, {"x.safetensors": folder / "x"}, {})
        found = checkpoint.newest(self.store)
        assert found is not None
        self.info: CheckpointInfo = found
        self.file = folder / "store" / found.folder / "x.safetensors"

    def read(self, parts: dict[str, tuple[int, int]] | None = None):
        return read_tensors(self.store, self.info, ("x.safetensors",), parts)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.setattr("areal_core.storage.checkpoint.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("areal_core.storage.parts.BLOCK_BYTES", BLOCK)
    return Stored(tmp_path)


@pytest.mark.parametrize("part", [None, (0, 600), (0, 1), (599, 600), (17, 400), (64, 128), (5, 5)])
def test_parts_are_elements_of_the_flat_tensor(stored: Stored, part: tuple[int, int] | None) -> None:
    read = stored.read({"a": part, "rng": (0, 0)} if part else None)
    assert read.arrays.keys() == ARRAYS.keys()
    expected = ARRAYS if part is None else ARRAYS | {"a": ARRAYS["a"].flatten()[slice(*part)], "rng": ARRAYS["rng"][:0]}
    for name, array in expected.items():
        np.testing.assert_array_equal(read.arrays[name], array)
        assert (read.arrays[name].dtype, read.shapes[name]) == (array.dtype, ARRAYS[name].shape)


def test_only_blocks_that_hold_a_part_are_downloaded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    get_range = Storage.get_range

    def watched(self: Storage, name: str, start: int, stop: int) -> bytes:
        ranges.append((start, stop))
        return get_range(self, name, start, stop)

    monkeypatch.setattr(Storage, "get_range", watched)
    stored.read()
    whole = {start for start, _ in ranges}
    ranges.clear()
    stored.read({"a": (0, 64)})
    assert {stop - start for start, stop in ranges} <= {BLOCK, stored.info.files["x.safetensors"].bytes % BLOCK}
    assert len({start for start, _ in ranges}) <= len(whole) - 7  # of about nine that hold `a`


def test_damage_is_found_by_who_reads_it(stored: Stored) -> None:
    data = bytearray(stored.file.read_bytes())
    data[-1] ^= 1  # of rng, which comes last
    stored.file.write_bytes(data)
    stored.read({"rng": (0, 1)})
    with pytest.raises(DamagedError, match=r"checkpoints/step-000003\.0/x\.safetensors is damaged: the \d+ bytes from"):
        stored.read()
    stored.file.write_bytes(data[:-1])
    with pytest.raises(DamagedError):
        stored.read()
