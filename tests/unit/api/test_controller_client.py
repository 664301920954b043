"""The client against a server that comes, goes and moves, as a restarted controller does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areal_core.api.controller_client import ControllerClient
from areal_core.errors import ProcessError, RunFinished
from areal_core.storage.rundir import RunDir, write_json

TOKEN = "the-token"
Respond = Callable[[str], tuple[int, bytes]]
Serve = Callable[[Respond], ThreadingHTTPServer]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path)
    folder.ready.mkdir()
    folder.token_file.write_text(f"{TOKEN}\n")
    return folder


@pytest.fixture
def serve(run: RunDir) -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(respond: Respond) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                known = self.headers["Authorization"] == f"Bearer {TOKEN}"
                status, body = respond(self.path) if known else (401, b"")
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        write_json(run.ready_file("controller"), {"pid": 0, "url": f"http://127.0.0.1:{server.server_port}"})
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


GROUP = {"group_id": 7, "lengths": [3, 1], "rewards": [1.0, None], "truncated": [False, True], "ready_version": 0}
MANIFEST = {
    "step": 1,
    "groups": [GROUP | {"prompt_tokens": 5, "checksums": [1, 2, 3], "segment": "000001-000001", "start": 12}],
}


def test_a_batch_is_polled_for_until_it_is_there(run: RunDir, serve: Serve) -> None:
    responses = iter([(204, b""), (204, b""), (200, json.dumps(MANIFEST).encode())])
    serve(lambda path: next(responses))
    manifest = ControllerClient(run).batch(1)
    assert manifest.step == 1
    assert manifest.groups[0].group_id == 7
    assert manifest.groups[0].rewards == (1.0, None)


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
