"""Where a store is, and what names are. What every kind of store does: tests/s3."""

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
