"""Where a store is, and what names are. What every kind of store does: tests/s3."""

from pathlib import Path

import pytest

from areal_core.errors import StorageError
from areal_core.storage.objects import Storage


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_folder_is_made_and_left_empty(tmp_path: Path, form: str) -> None:
    store = Storage.open(form.format(tmp_path / "a b" / "new"))
    assert store.url == str(tmp_path / "a b" / "new")
    assert list((tmp_path / "a b" / "new").iterdir()) == []
    for name in ("../x", "a/../../x"):
        with pytest.raises(StorageError, match="leaves the store"):
            store.put_bytes(name, b"x")
    for prefix in ("", "/"):
        with pytest.raises(StorageError, match="refuses to delete"):
            store.delete(prefix)


def test_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Storage.open(".areal/storage")
    monkeypatch.chdir("/")

    store.put_bytes("x", b"1")

    assert (tmp_path / ".areal" / "storage" / "x").read_bytes() == b"1"


@pytest.mark.parametrize(
    "url", ["gs://bucket/x", "", "file://", "s3://", "http://host/x", "/proc/areal", "/dev/null/x"]
)
def test_unusable_location_names_the_field(url: str) -> None:
    said = f"can't write {url}" if url.startswith("/") else ""
    with pytest.raises(StorageError, match=rf"^storage\.url: {said}") as caught:
        Storage.open(url)
    assert "\n" not in str(caught.value)
