"""Clients of the controller and of the head node, against servers that come, go, move and stop halfway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from blake3 import blake3

from areal_core.api import head as module
from areal_core.api.controller_client import ControllerClient
from areal_core.api.head import Head, HeadNodeError, checked_url, fetch
from areal_core.errors import ConfigError, ProcessError, RunFinished, StorageError
from areal_core.storage.rundir import RunDir, write_json
from tests.support.remote import HeadNode

TOKEN = "the-token"
Respond = Callable[[str], tuple[int, bytes]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status: int, body: bytes, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None: ...


Start = Callable[[type[BaseHTTPRequestHandler]], ThreadingHTTPServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ThreadingHTTPServer] = []

    def begin(handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


# -- the controller ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path)
    folder.ready.mkdir()
    folder.token_file.write_text(f"{TOKEN}\n")
    return folder


Serve = Callable[[Respond], ThreadingHTTPServer]


@pytest.fixture
def serve(run: RunDir, start: Start) -> Serve:
    def controller(respond: Respond) -> ThreadingHTTPServer:
        class Controller(Handler):
            def do_GET(self) -> None:
                known = self.headers["Authorization"] == f"Bearer {TOKEN}"
                status, body = respond(self.path) if known else (401, b"")
                self.send(status, body, len(body))

        server = start(Controller)
        write_json(run.ready_file("controller"), {"pid": 0, "url": f"http://127.0.0.1:{server.server_port}"})
        return server

    return controller


def test_a_join_is_asked_for_until_the_server_is_at_work(run: RunDir, serve: Serve) -> None:
    responses = iter([(204, b""), (200, b"{}"), (204, b""), (204, b""), (200, b"{}"), (502, b"it runs vLLM 0.31.0")])
    serve(lambda path: next(responses))
    client = ControllerClient(run)
    assert [client.register("a", "http://a", timeout_s=1.0) for _ in range(2)] == [False, True]
    client.join("a", "http://a")
    with pytest.raises(ProcessError, match=r"POST /servers answered 502: it runs vLLM 0\.31\.0"):
        client.join("a", "http://a")


def test_the_end_of_the_run_and_a_refusal_are_told_apart(run: RunDir, serve: Serve) -> None:
    serve(lambda path: (410, b"score") if "batch" in path else (400, b"no such group"))
    client = ControllerClient(run)
    with pytest.raises(RunFinished, match=r"^score$"):
        client.batch(3)
    with pytest.raises(ProcessError, match=r"GET /groups/9\?spans=0-1 answered 400: no such group"):
        client.group(9, [(0, 1)])


def test_a_restarted_controller_is_found_on_its_new_port(run: RunDir, serve: Serve) -> None:
    first = serve(lambda path: (200, b"old"))
    client = ControllerClient(run, patience_s=10.0)
    assert client.group(1, [(0, 3)]) == [b"old"]
    first.shutdown()
    first.server_close()
    client.close()  # the kept-alive connection would outlive a server thread, not a killed process
    serve(lambda path: (200, b"new"))
    assert client.group(1, [(0, 2), (2, 3)]) == [b"ne", b"w"]


def test_patience_ends_with_one_line_that_names_the_call(run: RunDir) -> None:
    with pytest.raises(
        ProcessError, match=r"controller: no response to GET /groups/1\?spans=0-1 within 0 s \(the controller is not"
    ):
        ControllerClient(run, patience_s=0.0).group(1, [(0, 1)])


def test_response_without_its_body_is_asked_for_again(run: RunDir, serve: Serve) -> None:
    """As a server that is killed while it writes one may leave it."""
    responses = iter([(200, b""), (200, b"the group")])
    serve(lambda path: next(responses))
    assert ControllerClient(run).group(1, [(0, 9)]) == [b"the group"]


# -- the head node -----------------------------------------------------------------------------------------------------

DATA = bytes(range(256)) * 64
DIGEST = blake3(DATA).hexdigest()


class Whole(Handler):
    """Sends DATA, from where it is asked for, as far as `most` bytes at a time; it always says that all will come."""

    most = len(DATA)
    ranges = True
    starts: list[int]

    def do_GET(self) -> None:
        asked = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        first = asked if self.ranges else 0
        self.starts.append(asked)
        self.send(206 if first else 200, DATA[first : first + self.most], len(DATA) - first)
        self.close_connection = True


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)


def copied(
    server: ThreadingHTTPServer, target: Path, *, digest: str = DIGEST, stop: bool = False, patience_s: float = 0.3
) -> int:
    head = Head(f"http://127.0.0.1:{server.server_port}", "t", timeout_s=2.0)
    return fetch(head, "/model/m", target, digest, stopped=lambda: stop, patience_s=patience_s)


@pytest.mark.parametrize(("most", "starts"), [(len(DATA), [0]), (5000, [0, 5000, 10000, 15000])])
def test_file_is_copied_and_goes_on_where_it_was_cut_short(
    start: Start, tmp_path: Path, most: int, starts: list[int]
) -> None:
    handler = type("Cut", (Whole,), {"starts": [], "most": most})
    assert copied(start(handler), tmp_path / "m") == len(DATA)
    assert (tmp_path / "m").read_bytes() == DATA
    assert handler.starts == starts


def test_what_is_cut_short_again_and_again_is_named(start: Start, tmp_path: Path) -> None:
    handler = type("Cut", (Whole,), {"starts": [], "most": 5000, "ranges": False})
    with pytest.raises(HeadNodeError, match=rf"^/model/m is incomplete, 5000 of {len(DATA)} bytes: the response ended"):
        copied(start(handler), tmp_path / "m")
    assert len(handler.starts) > 1


def test_damaged_file_and_one_that_nobody_waits_for_are_named(start: Start, tmp_path: Path) -> None:
    url = start(type("Cut", (Whole,), {"starts": []}))
    with pytest.raises(
        StorageError, match=rf"^http://\S+/model/m: must have digest abc, got {DIGEST}; .* restore it there$"
    ):
        copied(url, tmp_path / "m", digest="abc")
    with pytest.raises(HeadNodeError, match="the download was cancelled"):
        copied(url, tmp_path / "m", stop=True, patience_s=60.0)


def test_a_head_node_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HeadNodeError, match=r"is incomplete, 0 of None bytes: http://127\.0\.0\.1:1 does"):
        fetch(Head("http://127.0.0.1:1", "t"), "/model/m", tmp_path / "m", DIGEST, stopped=bool, patience_s=0.3)


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
            raise HeadNodeError("there is none yet")
        return where[-1]

    head = Head(url, head_node.run.token())
    with closing(head.session()) as session:
        with pytest.raises(HeadNodeError, match="there is none yet"):
            session.request("GET", "/run")
        for _ in range(2):  # the second ends the one before
            where.append(head_node.serve())
            assert session.request("GET", "/run")[0] == 200
            assert session.url == where[-1]


@pytest.mark.parametrize(
    "url",
    ["", "10.0.0.1:8900", "https://10.0.0.1:8900", "http://10.0.0.1", "http://10.0.0.1:x", "http://10.0.0.1:1/run"],
)
def test_what_is_no_url_of_a_head_node(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--head: must be the URL of a data server, such as http://10\.0\.0\.1:89"):
        checked_url(url)
    assert checked_url("http://[fd00::1]:8900/") == "http://[fd00::1]:8900"
