"""Checkpoints: complete or absent, whatever was cut short or damaged on the way."""

import json
import logging
from pathlib import Path

import pytest

from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "store"))


def save(store: Storage, tmp_path: Path, step: int, text: str = "weights") -> None:
    local = tmp_path / "model.safetensors"
    local.write_text(f"{text} {step}")
    checkpoint.save(store, step, {"model/model.safetensors": local}, {"version": step})


def newest_step(store: Storage) -> int | None:
    info = checkpoint.newest(store)
    return None if info is None else info.step


def test_what_is_saved_is_fetched(store: Storage, tmp_path: Path) -> None:
    (tmp_path / "optimizer").write_bytes(bytes(range(256)))
    save(store, tmp_path, 10)
    checkpoint.save(
        store, 20, {"optimizer": tmp_path / "optimizer", "model/weights": tmp_path / "model.safetensors"}, {"epoch": 1}
    )

    info = checkpoint.newest(store)
    assert info is not None
    assert (info.step, info.folder, info.extra) == (20, "checkpoints/step-000020", {"epoch": 1})
    files = checkpoint.fetch(store, info, tmp_path / "back")

    assert files == {name: tmp_path / "back" / name for name in ("optimizer", "model/weights")}
    assert files["optimizer"].read_bytes() == bytes(range(256))
    assert files["model/weights"].read_text() == "weights 10"


def test_files_of_another_process_are_part_of_it(store: Storage, tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"ledger")
    store.put_file(tmp_path / "ledger", f"{checkpoint.folder_name(5)}/ledger.sqlite")
    entry = checkpoint.describe(tmp_path / "ledger")

    checkpoint.save(store, 5, {}, {}, uploaded={"ledger.sqlite": entry})

    info = checkpoint.newest(store)
    assert info is not None
    assert info.files == {"ledger.sqlite": entry}


def test_promised_file_that_is_not_there_prevents_the_commit(store: Storage, tmp_path: Path) -> None:
    entry = checkpoint.FileEntry(bytes=6, sha256="0" * 64)

    with pytest.raises(StorageError, match=r"not committed: ledger\.sqlite is missing"):
        checkpoint.save(store, 5, {}, {}, uploaded={"ledger.sqlite": entry})
    assert newest_step(store) is None


def test_empty_store_has_none(store: Storage) -> None:
    assert checkpoint.newest(store) is None
    assert checkpoint.prune(store, 1) == 0


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "no entries", "file missing", "file truncated"])
def test_broken_checkpoint_is_never_chosen(
    store: Storage, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, tmp_path, 1)
    save(store, tmp_path, 2)
    folder = tmp_path / "store" / "checkpoints" / "step-000002"
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "half a manifest":
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(manifest[: len(manifest) // 2])
    elif damage == "no entries":
        (folder / "manifest.json").write_text("{}")
    elif damage == "file missing":
        (folder / "model" / "model.safetensors").unlink()
    else:
        (folder / "model" / "model.safetensors").write_text("w")

    with caplog.at_level(logging.WARNING):
        assert newest_step(store) == 1
    assert "skipping checkpoint" in caplog.text
    assert "step-000002" in caplog.text


def test_a_checkpoint_of_another_format_is_refused_not_skipped(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    name = "checkpoints/step-000001/manifest.json"
    manifest = json.loads(store.get_bytes(name))
    del manifest["format"]
    store.put_bytes(name, json.dumps(manifest).encode())
    with pytest.raises(StorageError, match=r"step-000001: a checkpoint of format 1, needed is 5; start .* another id$"):
        checkpoint.newest(store)


def test_changed_content_is_noticed_by_fetch(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 1, "weights")
    (tmp_path / "store" / "checkpoints" / "step-000001" / "model" / "model.safetensors").write_text("WEIGHTS 1")

    info = checkpoint.newest(store)
    assert info is not None
    with pytest.raises(StorageError, match=r"model/model\.safetensors is damaged"):
        checkpoint.fetch(store, info, tmp_path / "back")


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_taken(
    store: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(store, tmp_path, step)
    (tmp_path / "store" / "checkpoints" / "step-000003" / "model" / "model.safetensors").write_text("weighty 3")
    found = checkpoint.fetch_newest(store, tmp_path / "back")
    assert found is not None
    info, files = found
    assert info.step == 2
    assert files["model/model.safetensors"].read_text() == "weights 2"
    assert "step-000003/model/model.safetensors is damaged" in caplog.text
    assert newest_step(store) == 2  # for everybody else, too
    assert store.exists("checkpoints/step-000003/manifest.damaged.json")
    save(store, tmp_path, 3)
    assert newest_step(store) == 3


def test_a_checkpoint_that_is_newer_than_asked_for_is_left_alone(store: Storage, tmp_path: Path) -> None:
    for step in (1, 2):
        save(store, tmp_path, step)
    found = checkpoint.fetch_newest(store, tmp_path / "back", last=1)
    assert found is not None
    assert found[0].step == 1
    assert newest_step(store) == 2
    assert checkpoint.fetch_newest(store, tmp_path / "back", last=0) is None
    assert checkpoint.at_step(store, 1) == found[0]
    with pytest.raises(StorageError, match=r"step-000007: there is no complete checkpoint"):
        checkpoint.at_step(store, 7)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "a//b", ".hidden", ""])
def test_a_manifest_names_files_of_its_own_alone(
    store: Storage, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, tmp_path, 1)
    save(store, tmp_path, 2)
    file = "checkpoints/step-000002/manifest.json"
    manifest = json.loads(store.get_bytes(file))
    manifest["files"][name] = manifest["files"].pop("model/model.safetensors")
    store.put_bytes(file, json.dumps(manifest).encode())
    assert newest_step(store) == 1
    assert f"{name!r} is no name of a file" in caplog.text


def test_failed_upload_leaves_no_manifest(store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, tmp_path, 1)
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    put_file = Storage.put_file

    def fail_at_b(self: Storage, local: Path, name: str) -> None:
        if name == "b":
            raise StorageError("storage.url: can't write b: the network is down")
        put_file(self, local, name)

    monkeypatch.setattr(Storage, "put_file", fail_at_b)
    with pytest.raises(StorageError, match="the network is down"):
        checkpoint.save(store, 2, {"a": tmp_path / "a", "b": tmp_path / "b"}, {})

    assert list(store.list("checkpoints/step-000002")) == ["checkpoints/step-000002/a"]
    assert newest_step(store) == 1


def test_saving_a_step_again_is_incomplete_until_its_end(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    save(store, tmp_path, 2)

    with pytest.raises(StorageError, match="can't read"):
        checkpoint.save(store, 2, {"model": tmp_path / "absent"}, {})

    assert newest_step(store) == 1


def test_prune_keeps_the_newest_complete_ones(store: Storage, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        save(store, tmp_path, step)
    store.delete("checkpoints/step-000004/manifest.json")  # broken, and older than a complete one
    store.delete("checkpoints/step-000006/manifest.json")  # may be on its way
    store.put_bytes("final/model", b"another matter")

    assert checkpoint.prune(store, 2) == 3

    folders = {name.split("/")[1] for name in store.list("checkpoints")}
    assert folders == {"step-000003", "step-000005", "step-000006"}
    assert store.exists("final/model")


def test_manifest_vouches_for_every_file(store: Storage, tmp_path: Path) -> None:
    save(store, tmp_path, 3)

    manifest = json.loads(store.get_bytes("checkpoints/step-000003/manifest.json"))

    assert manifest["step"] == 3
    assert manifest["files"].keys() == {"model/model.safetensors"}
    assert manifest["files"]["model/model.safetensors"]["bytes"] == len("weights 3")
