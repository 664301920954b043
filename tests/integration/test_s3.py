"""A bucket whose server fails, over S3's real protocol, against moto's server on the loopback. What every kind of store
does: tests/s3."""

from __future__ import annotations

import http.client
import http.server
import logging
import os
import socket
import struct
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from moto.server import ThreadedMotoServer

from areal_core.storage.bucket import PART_BYTES
from areal_core.storage.objects import Storage
from areal_core.storage.patience import RetryPolicy
from tests.support.virtual import VirtualClock

_ANSWER_S = 60.0
_CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown", 403: "AccessDenied"}


class FaultyServer:
    """A context. `faults` are those of the next requests, one each:

    - a status: an error of S3's with it
    - "reset": the connection is reset
    - "cut": of the response's body half is sent (requests without one are handed on)
    - None: nothing
    """

    def __init__(self, url: str) -> None:
        self.faults: deque[int | str | None] = deque()
        self.requests: list[str] = []  # all that came, as "GET /path"
        self._upstream = urlsplit(url).netloc
        handler = type("Handler", (_Handler,), {"faulty": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def next_fault(self, request: str) -> int | str | None:
        self.requests.append(request)
        try:
            return self.faults.popleft()
        except IndexError:
            return None

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._upstream, timeout=_ANSWER_S)
        connection.request(method, path, body, headers)
        return connection.getresponse()


class _Handler(http.server.BaseHTTPRequestHandler):
    faulty: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        fault = self.faulty.next_fault(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif isinstance(fault, int):
            text = f"<Error><Code>{_CODES[fault]}</Code><Message>as told</Message></Error>".encode()
            self._send(fault, {"Content-Length": str(len(text)), "Content-Type": "application/xml"}, text)
        else:
            with self.faulty.ask(self.command, self.path, body, dict(self.headers)) as response:
                data = response.read()
                headers = {name: value for name, value in response.getheaders() if name.lower() != "transfer-encoding"}
                if self.command != "HEAD":
                    headers |= {"Content-Length": str(len(data))}
                half = fault == "cut" and bool(data)
                self._send(response.status, headers, data[: len(data) // 2] if half else data)
                self.close_connection = half

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 - the names that the library looks for


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def _credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.delenv("AWS_PROFILE", raising=False)
        patch.delenv("AWS_DEFAULT_REGION", raising=False)
        yield


@pytest.fixture(scope="module")
def faulty(endpoint: str) -> Iterator[FaultyServer]:
    with FaultyServer(endpoint) as server:
        yield server


@pytest.fixture(scope="module")
def opened(faulty: FaultyServer) -> Storage:
    """Once: a client of botocore's is dear to make."""
    return Storage.open(f"s3://areal-{uuid.uuid4().hex}/runs", faulty.url)


@pytest.fixture
def server(faulty: FaultyServer) -> FaultyServer:
    faulty.faults.clear()
    faulty.requests.clear()
    return faulty


@pytest.fixture
def time() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(opened: Storage, time: VirtualClock, caplog: pytest.LogCaptureFixture) -> Storage:
    """An empty one, whose patience is in virtual time."""
    caplog.set_level(logging.INFO, "areal_core.storage.patience")
    name = uuid.uuid4().hex
    return Storage(opened._kind, f"{opened._root}/{name}", f"{opened.url}/{name}", RetryPolicy(1800.0, time.clock))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = "areal_core.storage.patience"
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records if record.name == ours]


def get_file(store: Storage, folder: Path) -> bytes:
    store.get_file("a/name", folder / "back")
    return (folder / "back").read_bytes()


OPERATIONS: list[tuple[str | int, Callable[[Storage, Path], Any], Any]] = [  # what fails, how, and what it gives
    ("cut", lambda store, folder: store.get_bytes("a/name"), b"content"),
    ("cut", lambda store, folder: store.get_range("a/name", 1, 3), b"on"),
    (429, get_file, b"content"),
    ("cut", lambda store, folder: store.sizes(), {"a/name": 7}),
    (500, lambda store, folder: store.put_bytes("a/name", b"content"), None),
    ("reset", lambda store, folder: store.put_file(folder / "local", "a/name"), None),
    ("reset", lambda store, folder: store.delete("a/other"), None),
    (503, lambda store, folder: store.sizes(), {"a/name": 7}),
]


@pytest.mark.parametrize(("fault", "operation", "result"), OPERATIONS)
def test_operation_is_repeated_until_the_server_responds(
    server: FaultyServer,
    store: Storage,
    time: VirtualClock,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    fault: int | str,
    operation: Callable[[Storage, Path], Any],
    result: Any,
) -> None:
    (tmp_path / "local").write_bytes(b"content")
    store.put_bytes("a/name", b"content")
    server.faults.extend([fault] * 4)
    assert operation(store, tmp_path) == result
    assert not server.faults
    waits = range(1, 5) if isinstance(fault, str) else (4,)  # on a connection that was used before aiohttp tries twice
    assert len(time.slept) in waits  # nobody else below tries again by himself
    begin, end = told(caplog)
    assert begin.startswith("WARNING storage: can't ")
    assert begin.endswith("; retrying for up to 1800 s (storage.patience_s)")
    assert end == f"INFO storage: responds again, after {sum(time.slept):.1f} s"
    assert store.sizes() == {"a/name": 7}


@pytest.mark.parametrize("fault", [503, "reset", "cut"])
def test_of_a_big_file_only_what_failed_is_sent_again(
    server: FaultyServer, store: Storage, tmp_path: Path, fault: int | str
) -> None:
    """As often as not, in both directions."""
    data = os.urandom(3 * PART_BYTES)
    (tmp_path / "big").write_bytes(data)
    if fault != "cut":  # which is of responses that have bodies
        server.faults.extend([None, fault] * 8)
    store.put_file(tmp_path / "big", "big")
    assert sum(request.endswith("?uploads") for request in server.requests) == 1  # one upload: nothing began anew
    server.faults.clear()
    server.faults.extend([None, fault] * 8)
    server.requests.clear()
    store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert sum(request.startswith("HEAD") for request in server.requests) == 1


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(
    server: FaultyServer, store: Storage, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = bytes(2 * PART_BYTES), b"1" * (2 * PART_BYTES)
    for name, content in (("old", old), ("new", new)):
        (tmp_path / name).write_bytes(content)
    store.put_file(tmp_path / "old", "name")
    other = Storage.open(store.url, endpoint)
    ask, asked = server.ask, []

    def replace_first(method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        if method == "GET" and not asked:  # its size and its tag are known by now
            asked.append(path)
            other.put_file(tmp_path / "new", "name")
        return ask(method, path, body, headers)

    monkeypatch.setattr(server, "ask", replace_first)
    store.get_file("name", tmp_path / "back")
    assert asked
    assert (tmp_path / "back").read_bytes() == new
