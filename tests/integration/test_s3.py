"""The store and checkpoints over S3's real protocol, against moto's server on the loopback."""

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


@pytest.fixture
def store(endpoint: str) -> Storage:
    return Storage.open(f"s3://areal-{uuid.uuid4().hex}/runs/one/", endpoint)


def test_bucket_is_made_and_left_empty(endpoint: str, store: Storage) -> None:
    assert store.url.endswith("/runs/one")
    assert list(store.list()) == []
    bucket = store.url.removeprefix("s3://").partition("/")[0]
    assert list(Storage.open(f"s3://{bucket}", endpoint).list()) == []  # the bucket itself, which is there by now


def test_objects_come_back(store: Storage, tmp_path: Path) -> None:
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
    assert list(store.list("nothing")) == []


def test_file_of_many_parts(store: Storage, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 101  # above s3fs's part size of 50 MiB
    (tmp_path / "big").write_bytes(data)

    store.put_file(tmp_path / "big", "big")
    store.get_file("big", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == data


def test_other_writers_are_seen_at_once(endpoint: str, store: Storage) -> None:
    other = Storage.open(store.url, endpoint)
    assert not store.exists("x")
    assert list(store.list()) == []

    other.put_bytes("x", b"1")

    assert store.exists("x")
    assert list(store.list()) == ["x"]


def test_delete_takes_the_folder_and_not_its_namesakes(store: Storage) -> None:
    for name in ("step-1/a", "step-1/b/c", "step-10/a"):
        store.put_bytes(name, b"x")

    store.delete("step-1")
    store.delete("step-1")

    assert list(store.list()) == ["step-10/a"]


def test_checkpoints(store: Storage, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(os.urandom(1000))
    for step in (1, 2, 3, 4):
        checkpoint.save(store, step, {"a/model": tmp_path / "model"}, {"version": step})
    store.delete("checkpoints/step-000004/a/model")

    info = checkpoint.newest(store)
    assert info is not None
    assert info.step == 3
    files = checkpoint.fetch(store, info, tmp_path / "back")
    assert files["a/model"].read_bytes() == (tmp_path / "model").read_bytes()

    checkpoint.prune(store, 1)
    assert {name.split("/")[1] for name in store.list("checkpoints")} == {"step-000003", "step-000004"}


def test_absent_object_is_named(store: Storage) -> None:
    with pytest.raises(StorageError, match=rf"^storage\.url: can't read {store.url}/no/such: it does not exist"):
        store.get_bytes("no/such")


def assert_open_fails(url: str, endpoint: str, reason: str) -> None:
    with pytest.raises(StorageError, match=rf"^storage\.url: .*{reason}") as caught:
        Storage.open(url, endpoint)
    assert "\n" not in str(caught.value)


def test_closed_port_is_refused() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert_open_fails("s3://bucket/x", f"http://127.0.0.1:{closed.getsockname()[1]}", "Could not connect")


@pytest.mark.slow
def test_silent_endpoint_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert_open_fails("s3://bucket/x", f"http://127.0.0.1:{silent.getsockname()[1]}", "no response in time")


def test_wrong_endpoint_and_bucket_are_refused(endpoint: str) -> None:
    assert_open_fails("s3://bucket/x", "not a url", "Invalid endpoint")
    assert_open_fails("s3://Not_A_Bucket!/x", endpoint, "Invalid bucket name")
