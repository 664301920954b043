"""What every kind of store promises: a folder, moto's server, and Ceph's gateway."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from areal_core.errors import StorageError
from areal_core.storage.bucket import PART_BYTES
from areal_core.storage.objects import ChangedError, DamagedError, MissingError, Storage
from tests.s3.conftest import Place

_SERVERS = (pytest.param("moto", marks=pytest.mark.nightly), pytest.param("radosgw", marks=pytest.mark.s3))
every_kind = pytest.mark.parametrize("place", ["folder", *_SERVERS], indirect=True)
every_server = pytest.mark.parametrize("place", _SERVERS, indirect=True)


@every_kind
def test_a_new_store_is_left_empty(place: Place) -> None:
    store = place.open()
    assert store.url == place.url
    assert list(store.list()) == []
    assert list(place.open().list()) == []  # it is there by now


@every_server
def test_a_bucket_may_be_the_store(place: Place) -> None:
    bucket = f"areal-{uuid.uuid4().hex}"
    store = Storage.open(f"s3://{bucket}", place.endpoint_url)
    store.put_bytes("a/b", b"1")
    assert store.url == f"s3://{bucket}"
    assert store.sizes() == {"a/b": 1}


@every_kind
def test_objects_come_back(store: Storage, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"abc")
    store.put_file(tmp_path / "local", "d/e/file")
    store.put_bytes("d/e/file", b"longer than before")
    store.put_bytes("d/b", b"")
    store.get_file("d/e/file", tmp_path / "made" / "copy")
    assert (tmp_path / "made" / "copy").read_bytes() == b"longer than before"
    store.get_file("d/b", tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == store.get_bytes("d/b") == b""


@every_kind
def test_listings_and_ranges(store: Storage) -> None:
    for name in ("d/e/file", "d/b", "d.txt", "d e/+ü%"):
        store.put_bytes(name, name.encode())
    assert store.sizes("d") == {"d/b": 3, "d/e/file": 8}
    assert store.write_times("d").keys() == {"d/b", "d/e/file"}
    assert list(store.list()) == sorted(("d/e/file", "d/b", "d.txt", "d e/+ü%"))
    assert list(store.child("d").list("e")) == ["e/file"]
    assert list(store.list("nothing")) == []
    assert "d/e/file" in store.list()
    assert "d/e/files" not in store.list()
    assert store.get_bytes("d e/+ü%") == "d e/+ü%".encode()
    store.put_bytes("name", b"0123456789")
    spans = [(0, 10), (3, 5), (8, 20), (4, 4)]
    assert [store.get_range("name", *span) for span in spans] == [b"0123456789", b"34", b"89", b""]


@every_kind
@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES], ids=["one", "ragged", "three"])
def test_a_big_file_goes_in_parts(store: Storage, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "big").write_bytes(data)
    store.put_file(tmp_path / "big", "big")
    store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert store.sizes() == {"big": size}
    assert store.get_range("big", size - 5, size) == data[-5:]


@every_kind
def test_an_object_is_put_over_the_one_that_was_read(store: Storage) -> None:
    first = store.put_if_unchanged("d/name", b"1", None)
    with pytest.raises(
        ChangedError, match=rf"^storage\.url: can't write {store.url}/d/name: another process has changed"
    ):
        store.put_if_unchanged("d/name", b"other", None)
    assert store.get_with_etag("d/name") == (b"1", first)
    second = store.put_if_unchanged("d/name", b"2", first)
    assert second != first
    with pytest.raises(ChangedError):
        store.put_if_unchanged("d/name", b"other", first)
    assert store.get_with_etag("d/name") == (b"2", second)
    store.put_bytes("d/name", b"3")
    with pytest.raises(ChangedError):
        store.put_if_unchanged("d/name", b"other", second)
    store.delete("d/name")
    with pytest.raises(ChangedError):
        store.put_if_unchanged("d/name", b"other", second)
    with pytest.raises(MissingError):
        store.get_with_etag("d/name")
    assert list(store.list()) == []


@every_kind
def test_of_those_who_put_over_the_same_object_one_does(place: Place, store: Storage) -> None:
    store.put_bytes("name", b"0")
    for turn in range(3):
        mark = store.get_with_etag("name")[1]

        def put(writer: int, turn: int = turn, mark: str = mark) -> bool:
            try:
                place.open().put_if_unchanged("name", f"{turn}-{writer}".encode(), mark)
            except ChangedError:
                return False
            return True

        with ThreadPoolExecutor(4) as threads:
            done = list(threads.map(put, range(4)))
        assert sum(done) == 1
        assert store.get_bytes("name") == f"{turn}-{done.index(True)}".encode()


@every_kind
def test_a_reader_sees_one_of_the_writers_whole(store: Storage, tmp_path: Path) -> None:
    size = PART_BYTES + 1000  # two parts
    contents = [bytes([ord("a") + writer]) * size for writer in range(3)]
    for writer, content in enumerate(contents):
        (tmp_path / f"{writer}").write_bytes(content)
    store.put_file(tmp_path / "0", "name")

    def read(reader: int) -> bytes:
        store.get_file("name", tmp_path / f"back-{reader}")
        return (tmp_path / f"back-{reader}").read_bytes()

    with ThreadPoolExecutor(6) as threads:
        writes = [threads.submit(store.put_file, tmp_path / f"{writer}", "name") for writer in range(3)]
        reads = [threads.submit(read, reader) for reader in range(3)]
        for done in writes:
            done.result()
        assert all(done.result() in contents for done in reads)
    assert read(0) in contents
    assert list(store.list()) == ["name"]


@every_kind
def test_a_put_that_fails_leaves_the_old_object(store: Storage, tmp_path: Path) -> None:
    store.put_bytes("name", b"old")
    with pytest.raises(StorageError, match=rf"^storage\.url: can't write {store.url}/name: No such file or directory$"):
        store.put_file(tmp_path / "absent", "name")
    assert store.get_bytes("name") == b"old"
    assert store.sizes() == {"name": 3}


@every_kind
def test_delete_takes_the_folder_alone_and_what_is_absent_is_named(store: Storage) -> None:
    for name in ("step-1/a", "step-1/b/c", "step-10/a", "step-2"):
        store.put_bytes(name, b"x")
    store.delete("step-1")
    store.delete("step-1")
    store.delete("step-2")
    assert list(store.list()) == ["step-10/a"]
    absent = rf"^storage\.url: can't read {store.url}/no/such: (it does not exist|No such file or directory)$"
    for ask in (Storage.get_bytes, lambda store, name: store.get_file(name, Path(os.devnull))):
        with pytest.raises(StorageError, match=absent):
            ask(store, "no/such")


@every_server
def test_an_upload_that_is_given_up_leaves_nothing(place: Place, store: Storage, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(3 * PART_BYTES))
    tries = iter(range(3))  # an upload, one part of it and another, and no more

    def attempt(work: Any) -> Any:
        if next(tries, None) is None:
            raise PermissionError("enough")
        return work()

    with pytest.raises(PermissionError, match="enough"):
        store._kind.put_file(tmp_path / "big", f"{store._root}/big", attempt)
    assert list(store.list()) == []
    assert "big" not in store.list()
    uploads = _client(place).call_s3("list_multipart_uploads", Bucket=_at(place, "big")["Bucket"])
    assert _at(place, "big")["Key"] not in {upload["Key"] for upload in uploads.get("Uploads", [])}


@every_server
def test_an_object_that_was_changed_is_damaged(place: Place, store: Storage, tmp_path: Path) -> None:
    client = _client(place)
    at = _at(place, "name")
    store.put_bytes("name", b"as it was put")
    metadata = client.call_s3("head_object", **at)["Metadata"]
    client.call_s3("put_object", **at, Body=b"as it is now.", Metadata=metadata)
    damaged = rf"^storage\.url: can't read {store.url}/name: it is damaged: its CRC-32 is \w{{8}}, expected \w{{8}}$"
    with pytest.raises(DamagedError, match=damaged):
        store.get_bytes("name")
    with pytest.raises(DamagedError, match=damaged):
        store.get_file("name", tmp_path / "copy")
    assert store.get_with_etag("name")[0] == b"as it is now."  # a lease: whoever puts over it puts it right
    client.call_s3("put_object", **at, Body=b"by somebody else")  # who keeps no checksum
    assert store.get_bytes("name") == b"by somebody else"


def _at(place: Place, name: str) -> dict[str, str]:
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": f"{prefix}/{name}"}


def _client(place: Place) -> Any:
    return fsspec.filesystem("s3", endpoint_url=place.endpoint_url, skip_instance_cache=True)
