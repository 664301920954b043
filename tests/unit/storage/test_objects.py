"""The local store. The same behaviour over S3: tests/integration/test_s3.py."""

from pathlib import Path

import pytest

from areal_core.errors import StorageError
from areal_core.storage.objects import Storage


def one_line(error: pytest.ExceptionInfo[StorageError]) -> bool:
    return "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_folder_is_made_and_left_empty(tmp_path: Path, form: str) -> None:
    store = Storage.open(form.format(tmp_path / "a b" / "new"))

    assert store.url == str(tmp_path / "a b" / "new")
    assert list((tmp_path / "a b" / "new").iterdir()) == []


def test_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Storage.open(".areal/storage")
    monkeypatch.chdir("/")

    store.put_bytes("x", b"1")

    assert (tmp_path / ".areal" / "storage" / "x").read_bytes() == b"1"


def test_objects_come_back(tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path / "store"))
    (tmp_path / "local").write_bytes(b"abc")
    store.put_file(tmp_path / "local", "d/e/file")
    store.put_bytes("d/e/file", b"longer than before")
    store.put_bytes("d/b", b"")

    store.get_file("d/e/file", tmp_path / "made" / "copy")

    assert (tmp_path / "made" / "copy").read_bytes() == b"longer than before"
    assert store.get_bytes("d/b") == b""
    assert store.sizes("d") == {"d/b": 0, "d/e/file": 18}
    assert list(store.list()) == ["d/b", "d/e/file"]
    assert list(store.child("d").list("e")) == ["e/file"]
    assert store.exists("d/e/file")
    assert not store.exists("d/e/files")


def test_list_of_an_absent_folder_is_empty(tmp_path: Path) -> None:
    assert list(Storage.open(str(tmp_path)).list("nothing")) == []


def test_delete_takes_the_folder_and_not_its_namesakes(tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path))
    for name in ("step-1/a", "step-1/b/c", "step-10/a"):
        store.put_bytes(name, b"x")

    store.delete("step-1")
    store.delete("step-1")

    assert list(store.list()) == ["step-10/a"]


def test_failed_put_leaves_the_old_object(tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path / "store"))
    store.put_bytes("name", b"old")

    with pytest.raises(StorageError, match="can't write"):
        store.put_file(tmp_path / "absent", "name")

    assert store.get_bytes("name") == b"old"
    assert list((tmp_path / "store").iterdir()) == [tmp_path / "store" / "name"]


def test_absent_object_is_named(tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path))

    with pytest.raises(StorageError, match=rf"can't read {tmp_path}/no/such: No such file or directory") as caught:
        store.get_bytes("no/such")
    assert one_line(caught)


@pytest.mark.parametrize("name", ["../x", "a/../../x"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="leaves the store"):
        Storage.open(str(tmp_path)).put_bytes(name, b"x")


@pytest.mark.parametrize("prefix", ["", "/"])
def test_whole_store_is_never_deleted(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(StorageError, match="refuses to delete"):
        Storage.open(str(tmp_path)).delete(prefix)


@pytest.mark.parametrize("url", ["gs://bucket/x", "", "file://", "s3://", "http://host/x"])
def test_unknown_location_names_the_field(url: str) -> None:
    with pytest.raises(StorageError, match=r"^storage\.url: ") as caught:
        Storage.open(url)
    assert one_line(caught)


def test_unwritable_folders_name_the_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    for folder in (str(tmp_path / "file" / "below"), "/proc/areal"):
        with pytest.raises(StorageError, match=rf"^storage\.url: can't write {folder}") as caught:
            Storage.open(folder)
        assert one_line(caught)
