"""Files of the head node: copied whole or not at all, whatever becomes of it meanwhile."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from blake3 import blake3

from areal_core.api import head as module
from areal_core.api.head import AwayError, Head, checked_url, fetch
from areal_core.errors import ConfigError, StorageError
from tests.support.remote import HeadNode

DATA = bytes(range(256)) * 64
DIGEST = blake3(DATA).hexdigest()
Start = Callable[[type[BaseHTTPRequestHandler]], str]


class Whole(BaseHTTPRequestHandler):
    """Sends DATA, from where it is asked for, as far as `most` bytes at a time; it always says that all will come."""

    protocol_version = "HTTP/1.1"
    most = len(DATA)
    ranges = True
    starts: list[int]

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        start = int(asked) if self.ranges else 0
        self.starts.append(int(asked))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(DATA) - start))
        self.end_headers()
        self.wfile.write(DATA[start : start + self.most])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    servers: list[socketserver.BaseServer] = []

    def begin(handler: type[BaseHTTPRequestHandler]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def copied(url: str, target: Path, *, digest: str = DIGEST, stop: bool = False, patience_s: float = 0.3) -> int:
    head = Head(url, "t", timeout_s=2.0)
    return fetch(head, "/model/m", target, digest, stopped=lambda: stop, patience_s=patience_s)


@pytest.mark.parametrize(("most", "starts"), [(len(DATA), [0]), (5000, [0, 5000, 10000, 15000])])
def test_file_is_copied_and_goes_on_where_it_was_cut_short(
    start: Start, tmp_path: Path, most: int, starts: list[int]
) -> None:
    handler = type("Handler", (Whole,), {"starts": [], "most": most})
    assert copied(start(handler), tmp_path / "m") == len(DATA)
    assert (tmp_path / "m").read_bytes() == DATA
    assert handler.starts == starts


def test_what_is_cut_short_again_and_again_is_named(start: Start, tmp_path: Path) -> None:
    handler = type("Handler", (Whole,), {"starts": [], "most": 5000, "ranges": False})
    with pytest.raises(AwayError, match=rf"^/model/m is cut short, 5000 of {len(DATA)} bytes: the response ended"):
        copied(start(handler), tmp_path / "m")
    assert len(handler.starts) > 1


def test_damaged_file_and_one_that_nobody_waits_for_are_named(start: Start, tmp_path: Path) -> None:
    url = start(type("Handler", (Whole,), {"starts": []}))
    with pytest.raises(StorageError, match=rf"^/model/m is damaged: its digest is {DIGEST}, must be abc$"):
        copied(url, tmp_path / "m", digest="abc")
    with pytest.raises(AwayError, match="nobody waits for it any more"):
        copied(url, tmp_path / "m", stop=True, patience_s=60.0)


def test_a_head_node_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AwayError, match=r"is cut short, 0 of None bytes: the head node at http://127\.0\.0\.1:1 does"):
        copied("http://127.0.0.1:1", tmp_path / "m")


def test_a_file_that_the_head_node_has_not_and_a_token_that_it_refuses(head_node: HeadNode, tmp_path: Path) -> None:
    (head_node.model / "merges.txt").touch()
    head = head_node.head()
    empty = blake3().hexdigest()
    assert fetch(head, "/model/merges.txt", tmp_path / "m", empty, stopped=bool, patience_s=1.0) == 0
    with pytest.raises(StorageError, match=r"/model/other: 404: the model has no such file$"):
        fetch(head, "/model/other", tmp_path / "m", DIGEST, stopped=lambda: False, patience_s=60.0)
    stranger = Head(head.url, "another")
    with pytest.raises(ConfigError, match=r"^--token-file: http://.* refuses this token"):
        fetch(stranger, "/model/config.json", tmp_path / "m", DIGEST, stopped=lambda: False, patience_s=60.0)


def test_a_head_node_that_has_moved_is_asked_for_again(head_node: HeadNode) -> None:
    where: list[str] = []

    def url() -> str:
        if not where:
            raise AwayError("there is none yet")
        return where[-1]

    head = Head(url, head_node.run.token())
    with closing(head.session()) as session:
        with pytest.raises(AwayError, match="there is none yet"):
            session.ask("GET", "/run")
        for _ in range(2):  # the second ends the one before
            where.append(head_node.serve())
            assert session.ask("GET", "/run")[0] == 200
            assert session.url == where[-1]


@pytest.mark.parametrize(
    "url",
    ["", "10.0.0.1:8900", "https://10.0.0.1:8900", "http://10.0.0.1", "http://10.0.0.1:x", "http://10.0.0.1:1/run"],
)
def test_what_is_no_url_of_a_head_node(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--head: must be the URL of the head node's data server, as http://10\.0\.0\.1:89"
    ):
        checked_url(url)
    assert checked_url("http://[fd00::1]:8900/") == "http://[fd00::1]:8900"
