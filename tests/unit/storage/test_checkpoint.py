"""Checkpoints: complete or absent, whatever was cut short or damaged on the way."""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from areal_core.errors import StorageError
from areal_core.models.tensorfile import write_tensors
from areal_core.storage import checkpoint
from areal_core.storage.objects import DamagedError, Storage
from areal_core.storage.parts import Tensors, read_tensors
from areal_core.types import FORMAT


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "store"))


def save(
    store: Storage, tmp_path: Path, step: int, text: str = "weights", *, number: int = 0, shared: tuple[str, ...] = ()
) -> None:
    """A checkpoint of one small file. What it shares is in the store already."""
    local = tmp_path / "model.safetensors"
    local.write_text(f"{text} {step}")
    entries = {name: entry(store.get_bytes(name)) for name in shared}
    checkpoint.save(store, step, {"model/model.safetensors": local}, {"version": step}, number=number, shared=entries)


def entry(data: bytes) -> checkpoint.FileEntry:
    return checkpoint.FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), crc32=[zlib.crc32(data)])


def folders(store: Storage) -> set[str]:
    return {name.split("/")[1] for name in store.list("checkpoints")}


def newest_step(store: Storage) -> int | None:
    info = checkpoint.newest(store)
    return None if info is None else info.step


def test_what_is_saved_is_fetched(store: Storage, tmp_path: Path) -> None:
    assert (checkpoint.newest(store), checkpoint.prune(store, 1)) == (None, 0)
    (tmp_path / "optimizer").write_bytes(bytes(range(256)))
    save(store, tmp_path, 10)
    checkpoint.save(
        store, 20, {"optimizer": tmp_path / "optimizer", "model/weights": tmp_path / "model.safetensors"}, {"epoch": 1}
    )
    info = checkpoint.newest(store)
    assert info is not None
    assert (info.step, info.folder, info.extra) == (20, "checkpoints/step-000020.0", {"epoch": 1})
    files = checkpoint.fetch(store, info, tmp_path / "back")
    assert files == {name: tmp_path / "back" / name for name in ("optimizer", "model/weights")}
    assert files["optimizer"].read_bytes() == bytes(range(256))
    assert files["model/weights"].read_text() == "weights 10"


def test_blocks_of_8_mib_have_a_checksum_each(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(8 * 2**20 + 1))
    assert checkpoint.describe(file).crc32 == [zlib.crc32(bytes(8 * 2**20)), zlib.crc32(bytes(1))]


def test_a_launcher_of_any_number_prunes(store: Storage, tmp_path: Path) -> None:
    for step in (10, 20):
        save(store, tmp_path, step, number=1000)
    assert checkpoint.prune(store, 1, number=int("1000")) == 20
    assert folders(store) == {"step-000020.1000"}


def test_shared_files_that_are_missing_or_damaged_here_are_fetched(store: Storage, tmp_path: Path) -> None:
    store.put_bytes("payloads/0/a.bin", b"whole")
    save(store, tmp_path, 1, shared=("payloads/0/a.bin",))
    info, here = checkpoint.newest(store), tmp_path / "here"
    assert info is not None
    here.mkdir()
    for left in (None, b"torn!"):
        if left is not None:
            (here / "a.bin").write_bytes(left)
        checkpoint.fetch_shared(store, info, here)
        assert (here / "a.bin").read_bytes() == b"whole"


def test_files_of_another_process_are_part_of_it_if_they_are_there(store: Storage, tmp_path: Path) -> None:
    missing = checkpoint.FileEntry(bytes=6, sha256="0" * 64, crc32=[0])
    with pytest.raises(StorageError, match=r"not committed: ledger\.sqlite is missing"):
        checkpoint.save(store, 5, {}, {}, uploaded={"ledger.sqlite": missing})
    with pytest.raises(StorageError, match=r"not committed: payloads/a is missing"):
        checkpoint.save(store, 5, {}, {}, shared={"payloads/a": missing})
    assert newest_step(store) is None
    (tmp_path / "ledger").write_bytes(b"ledger")
    store.put_file(tmp_path / "ledger", f"{checkpoint.folder_name(5, 0)}/ledger.sqlite")
    ledger = checkpoint.describe(tmp_path / "ledger")
    checkpoint.save(store, 5, {}, {}, uploaded={"ledger.sqlite": ledger})
    info = checkpoint.newest(store)
    assert info is not None
    assert info.files == {"ledger.sqlite": ledger}


BREAKS: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: rewrite(folder, lambda manifest: manifest[: len(manifest) // 2]),
    "no entries": lambda folder: rewrite(folder, lambda manifest: "{}"),
    "no object": lambda folder: rewrite(folder, lambda manifest: "[]"),
    "nested manifest": lambda folder: rewrite(folder, lambda manifest: "[" * 200_000),
    "changed manifest": lambda folder: rewrite(folder, lambda text: text.replace('"version": 2', '"version": 3')),
    "not shared": lambda folder: (folder.parents[1] / "payloads" / "a.bin").unlink(),
    "file missing": lambda folder: (folder / "model" / "model.safetensors").unlink(),
    "file truncated": lambda folder: (folder / "model" / "model.safetensors").write_text("w"),
}


def rewrite(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / "manifest.json"
    file.write_text(change(file.read_text()))


@pytest.mark.parametrize("damage", BREAKS)
def test_broken_checkpoint_is_never_chosen(
    store: Storage, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, tmp_path, 1)
    store.put_bytes("payloads/a.bin", b"a")
    save(store, tmp_path, 2, shared=("payloads/a.bin",))
    BREAKS[damage](tmp_path / "store" / "checkpoints" / "step-000002.0")
    with caplog.at_level(logging.WARNING):
        assert newest_step(store) == 1
    assert "skipping checkpoint" in caplog.text
    assert "step-000002.0" in caplog.text


def test_one_that_is_deleted_for_a_newer_one_while_it_is_looked_at(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launcher of a run that somebody else looks at."""
    save(store, tmp_path, 2)
    get_bytes = Storage.get_bytes

    def late(self: Storage, name: str) -> bytes:
        monkeypatch.setattr(Storage, "get_bytes", get_bytes)
        save(store, tmp_path, 4)
        checkpoint.prune(store, 1)
        return self.get_bytes(name)

    monkeypatch.setattr(Storage, "get_bytes", late)
    assert newest_step(store) == 4


def test_a_checkpoint_of_another_format_is_refused_not_skipped(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    name = "checkpoints/step-000001.0/manifest.json"
    manifest = json.loads(store.get_bytes(name))
    del manifest["sha256"]
    manifest["format"] = 1
    manifest["sha256"] = checkpoint._seal(manifest)
    store.put_bytes(name, json.dumps(manifest).encode())
    with pytest.raises(StorageError, match=rf"step-000001\.0: the checkpoint has format 1, must be {FORMAT}; start"):
        checkpoint.newest(store)


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_taken(
    store: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(store, tmp_path, step)
    (tmp_path / "store" / "checkpoints" / "step-000003.0" / "model" / "model.safetensors").write_text("weighty 3")
    found = checkpoint.newest_of(store, lambda info: checkpoint.fetch(store, info, tmp_path / "back"))
    assert found is not None
    info, files = found
    assert info.step == 2
    assert files["model/model.safetensors"].read_text() == "weights 2"
    assert "step-000003.0/model/model.safetensors is damaged" in caplog.text
    assert newest_step(store) == 2  # for everybody else, too
    assert "checkpoints/step-000003.0/manifest.damaged.json" in store.list()
    save(store, tmp_path, 3)
    assert newest_step(store) == 3


def test_a_checkpoint_that_is_newer_than_asked_for_is_left_alone(store: Storage, tmp_path: Path) -> None:
    for step in (1, 2):
        save(store, tmp_path, step)
    assert checkpoint.newest(store, last=1) == checkpoint.at(store, 1, 0)
    assert newest_step(store) == 2
    with pytest.raises(StorageError, match=r"step-000007\.0: no complete checkpoint"):
        checkpoint.at(store, 7, 0)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "a//b", ".hidden", ""])
def test_a_manifest_names_files_of_its_own_alone(
    store: Storage, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, tmp_path, 1)
    save(store, tmp_path, 2)
    file = "checkpoints/step-000002.0/manifest.json"
    manifest = json.loads(store.get_bytes(file))
    manifest["files"][name] = manifest["files"].pop("model/model.safetensors")
    del manifest["sha256"]
    manifest["sha256"] = checkpoint._seal(manifest)
    store.put_bytes(file, json.dumps(manifest).encode())
    assert newest_step(store) == 1
    assert f"{name!r} is not a valid name of a checkpoint file" in caplog.text


def test_checkpoint_is_incomplete_until_its_last_file_is_there(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    (tmp_path / "a").write_text("a")
    for _ in range(2):
        with pytest.raises(StorageError, match="can't read"):
            checkpoint.save(store, 2, {"a": tmp_path / "a", "b": tmp_path / "absent"}, {})
        assert "checkpoints/step-000002.0/a" in store.list("checkpoints")
        assert newest_step(store) == 1
        checkpoint.save(store, 2, {"a": tmp_path / "a"}, {})  # and is so again while it is saved again
        assert newest_step(store) == 2


def test_prune_keeps_the_newest_complete_ones(store: Storage, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        save(store, tmp_path, step)
    store.delete("checkpoints/step-000004.0/manifest.json")  # broken, and older than a complete one
    store.delete("checkpoints/step-000006.0/manifest.json")  # may be on its way
    store.put_bytes("final/model", b"another matter")
    assert checkpoint.prune(store, 2) == 3
    assert folders(store) == {"step-000003.0", "step-000005.0", "step-000006.0"}
    assert "final/model" in store.list()


def test_prune_keeps_what_kept_ones_share(store: Storage, tmp_path: Path) -> None:
    for name in "abcd":
        store.put_bytes(f"payloads/0/{name}.bin", name.encode())
    for step, shared in {1: "c", 2: "ab", 3: ""}.items():
        save(store, tmp_path, step, shared=tuple(f"payloads/0/{name}.bin" for name in shared))

    assert checkpoint.prune(store, 2, in_use=["payloads/0/d.bin"]) == 2  # what a run is replayed from
    assert folders(store) == {"step-000002.0", "step-000003.0"}
    assert list(store.list("payloads")) == ["payloads/0/a.bin", "payloads/0/b.bin", "payloads/0/d.bin"]


def test_the_work_of_a_later_launcher_is_newer_whatever_its_step(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 10, number=1)
    save(store, tmp_path, 4, number=2)
    save(store, tmp_path, 20, number=1)  # it does not know yet that it has lost the run
    store.put_bytes("payloads/1/late.bin", b"x")
    info = checkpoint.newest(store)
    assert info is not None
    assert (info.step, info.number) == (4, 2)
    assert checkpoint.prune(store, 1, number=1) == 0  # nor what is the other's
    assert len(folders(store)) == 3
    assert checkpoint.prune(store, 1, number=2) == 4
    assert folders(store) == {"step-000004.2", "step-000020.1"}  # of which its manifest knows nothing
    assert list(store.list("payloads")) == ["payloads/1/late.bin"]
    save(store, tmp_path, 5, number=2)
    assert checkpoint.prune(store, 1, number=2) == 5
    assert folders(store) == {"step-000005.2"}
    assert list(store.list("payloads")) == []


def test_a_launcher_deletes_what_is_its_own_or_superseded(store: Storage, tmp_path: Path) -> None:
    for number, name in ((1, "a"), (1, "b"), (2, "c"), (2, "d"), (3, "e")):
        store.put_bytes(f"payloads/{number}/{name}.bin", name.encode())
    save(store, tmp_path, 5, number=1, shared=("payloads/1/a.bin",))
    save(store, tmp_path, 10, number=1)
    save(store, tmp_path, 20, number=2)
    save(store, tmp_path, 30, number=2, shared=("payloads/2/c.bin",))
    store.put_bytes("checkpoints/step-000040.3/model/model.safetensors", b"a later launcher's first")
    checkpoint.prune(store, 1, number=2)
    assert folders(store) == {"step-000030.2", "step-000040.3"}
    assert list(store.list("payloads")) == ["payloads/2/c.bin", "payloads/3/e.bin"]


def test_what_nobody_lists_is_left_over(store: Storage, tmp_path: Path) -> None:
    store.put_bytes("payloads/1/a.bin", b"a")
    save(store, tmp_path, 10, number=1)
    store.put_bytes("checkpoints/step-000020.1/model/model.safetensors", b"half")
    store.put_bytes("payloads/2/b.bin", b"b")
    store.put_bytes("payloads/2/c.bin", b"c")
    save(store, tmp_path, 15, number=2, shared=("payloads/2/b.bin",))
    store.put_bytes("payloads/3/d.bin", b"d")
    store.put_bytes("checkpoints/step-000010.1/of-nobody", b"x")
    assert checkpoint.highest_number(store) == 3
    assert checkpoint.leftovers(store, 1) == {}
    assert checkpoint.leftovers(store, 3) == {
        "checkpoints/step-000010.1/of-nobody": 1,
        "checkpoints/step-000020.1/model/model.safetensors": 4,
        "payloads/1/a.bin": 1,
        "payloads/2/c.bin": 1,
    }


@pytest.mark.parametrize("damage", ["file gone", "manifest torn", "found damaged", "being replaced"])
def test_a_run_whose_checkpoints_are_all_broken_is_not_begun_anew(store: Storage, tmp_path: Path, damage: str) -> None:
    save(store, tmp_path, 1)
    save(store, tmp_path, 2)
    info = checkpoint.newest(store)
    assert info is not None
    store.delete("checkpoints/step-000001.0/model")
    if damage == "file gone":
        store.delete(f"{info.folder}/model")
    elif damage == "manifest torn":
        store.put_bytes(f"{info.folder}/manifest.json", b"{")
    elif damage == "found damaged":
        checkpoint.set_aside(store, info, "damaged")
    else:
        with pytest.raises(StorageError, match="can't read"):
            checkpoint.save(store, 2, {"model": tmp_path / "absent"}, {})

    refused = r"none of 2 checkpoints is complete: restore the missing files, or start the run under another id$"
    with pytest.raises(StorageError, match=refused):
        checkpoint.newest(store)
    assert checkpoint.leftovers(store, 9) == {}  # what is left of them may be all that is left
    with pytest.raises(StorageError, match=refused):
        checkpoint.newest_of(store, lambda info: None)

    save(store, tmp_path, 1)  # its launcher had all that it takes
    assert newest_step(store) == 1


@pytest.mark.parametrize(("moved", "to"), [(2, 3), (2, 1)])
def test_a_checkpoint_under_the_name_of_another_step_is_none(
    store: Storage, tmp_path: Path, moved: int, to: int
) -> None:
    save(store, tmp_path, moved)
    for name in list(store.list("checkpoints")):
        store.put_bytes(name.replace(f"step-00000{moved}", f"step-00000{to}"), store.get_bytes(name))
        store.delete(name)
    with pytest.raises(StorageError, match="none of 1 checkpoints is complete"):
        checkpoint.newest(store)


def test_a_first_checkpoint_that_is_written_while_it_is_looked_for_is_not_a_broken_one(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Storage.sizes

    def early(self: Storage, prefix: str = "") -> dict[str, int]:
        found = sizes(self, prefix)
        if prefix == checkpoint.PAYLOADS:  # the last part of a listing
            monkeypatch.setattr(Storage, "sizes", sizes)
            save(store, tmp_path, 2)
        return found

    for look in (checkpoint.newest, lambda store: checkpoint.newest_of(store, lambda info: info)):
        store.delete("checkpoints")
        store.put_bytes("checkpoints/step-000002.0/first", b"its first file")
        monkeypatch.setattr(Storage, "sizes", early)
        assert look(store) is None
        assert newest_step(store) == 2


def test_a_checkpoint_that_is_gone_is_not_taken_for_a_beginning(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 20)
    with pytest.raises(StorageError, match=r"no checkpoint of step 10 or earlier; another launcher"):
        checkpoint.newest(store, last=10)


BLOCK = 256
ARRAYS = {
    "a": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b": np.arange(7, dtype=np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "rng": np.arange(200, dtype=np.uint8),
}


Stored = tuple[Path, Callable[..., Tensors]]  # a file, and how parts of its tensors are read


@pytest.fixture
def stored(store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.setattr("areal_core.storage.checkpoint.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("areal_core.storage.parts.BLOCK_BYTES", BLOCK)
    write_tensors(tmp_path / "x", ARRAYS)
    checkpoint.save(store, 3, {"x.safetensors": tmp_path / "x"}, {})
    found = checkpoint.newest(store)
    assert found is not None
    return tmp_path / "store" / found.folder / "x.safetensors", partial(read_tensors, store, found, ("x.safetensors",))


@pytest.mark.parametrize("part", [None, (0, 600), (0, 1), (599, 600), (17, 400), (64, 128), (5, 5)])
def test_parts_are_elements_of_the_flat_tensor(stored: Stored, part: tuple[int, int] | None) -> None:
    read = stored[1]({"a": part, "rng": (0, 0)} if part else None)
    assert read.arrays.keys() == ARRAYS.keys()
    expected = ARRAYS if part is None else ARRAYS | {"a": ARRAYS["a"].flatten()[slice(*part)], "rng": ARRAYS["rng"][:0]}
    for name, array in expected.items():
        np.testing.assert_array_equal(read.arrays[name], array)
        assert (read.arrays[name].dtype, read.shapes[name]) == (array.dtype, ARRAYS[name].shape)


def test_damage_is_found_by_who_reads_it(stored: Stored) -> None:
    file, read = stored
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of rng, which comes last
    file.write_bytes(data)
    read({"rng": (0, 1)})
    with pytest.raises(DamagedError, match=r"checkpoints/step-000003\.0/x\.safetensors is damaged: the \d+ bytes from"):
        read(None)
    file.write_bytes(data[:-1])
    with pytest.raises(DamagedError):
        read(None)
