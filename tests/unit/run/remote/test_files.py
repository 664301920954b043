"""The head node's files: what is served to whom, and what may be appended to them."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from blake3 import blake3

from areal_core.api.access import authorization
from areal_core.api.head import Head
from areal_core.run.remote import files as module
from areal_core.storage import weights
from areal_core.storage.rundir import write_json
from tests.support.processes import wait_for
from tests.support.remote import PATIENCE_S, HeadNode

SAID = {"role": "generation", "first": 0, "count": 1, "address": "10.0.0.2"}


class Asked:
    """Requests with the run's token, to what serves a head node's files."""

    def __init__(self, head_node: HeadNode) -> None:
        self._where = urllib.parse.urlsplit(head_node.serve())
        self._known = authorization(head_node.run.token())

    def __call__(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(str(self._where.hostname), self._where.port, timeout=30)
        try:
            connection.request(method, path, body, self._known)
            response = connection.getresponse()
            self.headers = response.headers
            return response.status, response.read()
        finally:
            connection.close()

    def hear(self, node: str = "a", **fields: Any) -> Any:
        status, content = self("POST", f"/nodes/{node}", json.dumps(SAID | fields).encode())
        assert status == 200, content
        return json.loads(content)


@pytest.fixture
def ask(head_node: HeadNode) -> Asked:
    return Asked(head_node)


def test_a_version_as_long_as_it_is_kept(ask: Asked, head_node: HeadNode) -> None:
    made = head_node.publish(7)
    data = weights.weights_file(Path(made.path)).read_bytes()
    assert ask("GET", "/versions/7") == (200, data)
    assert ask.headers["X-Digest"] == made.digest == blake3(data).hexdigest()
    assert ask("GET", f"/versions/7?digest={made.digest}") == (200, data)
    line = f"version 7 has digest {made.digest}, expected abc"
    assert ask("GET", "/versions/7?digest=abc") == (404, line.encode())
    weights.release(head_node.run.weights, [7])
    assert ask("GET", "/versions/7") == (404, b"version 7 does not exist, or was deleted")


SEGMENT = bytes(range(256))


@pytest.fixture
def segment(head_node: HeadNode) -> Path:
    """One that holds SEGMENT."""
    head_node.run.payloads.mkdir()
    file = head_node.run.payloads / "000002-000007.bin"
    file.write_bytes(SEGMENT)
    return file


@pytest.mark.parametrize(
    ("spans", "parts"),
    [
        ("0-256", SEGMENT),
        ("250-256,0-3", SEGMENT[250:] + SEGMENT[:3]),
        ("256-256", b""),
        ("0-128,0-128", SEGMENT[:128] * 2),
    ],
)
@pytest.mark.usefixtures("segment")
def test_parts_of_a_segment_come_end_to_end(ask: Asked, spans: str, parts: bytes) -> None:
    assert ask("GET", f"/payloads/000002-000007?spans={spans}") == (200, parts)


MORE = ["0-257", "256-257", "300-300", "0-3,250-999999999999999", "0-200,0-57"]


@pytest.mark.parametrize(
    ("spans", "status", "line"),
    [
        *((spans, 416, b"spans: must lie within segment 000002-000007, and add up") for spans in MORE),
        ("a-b", 400, b"spans: must be byte ranges START-END without byte END, such as 0-48,96-200, got "),
    ],
)
@pytest.mark.usefixtures("segment")
def test_spans_that_are_none_are_refused_in_one_line(ask: Asked, spans: str, status: int, line: bytes) -> None:
    got, content = ask("GET", f"/payloads/000002-000007?spans={spans}")
    assert (got, content[: len(line)], len(content.splitlines())) == (status, line, 1)
    assert len(content) < 250


def test_a_version_of_rank_0_is_fetched_as_often_as_it_is_announced(
    head_node: HeadNode, serve: Callable[[Callable[[], web.Application]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that takes longer than a request waits; the copy here may be damaged by the next time."""
    monkeypatch.setattr(module, "_FETCH_S", 0.05)
    alone = dataclasses.replace(head_node.config.launch, remote_roles="trainer", head_trains=False)
    config = dataclasses.replace(head_node.config, launch=alone)
    write_json(head_node.run.root / "config.json", config.to_dict())
    made, arrives = head_node.publish(1), threading.Event()
    data = weights.weights_file(Path(made.path)).read_bytes()
    weights.release(head_node.run.weights, [1])

    async def version(_: web.Request) -> web.Response:
        await asyncio.to_thread(arrives.wait)
        return web.Response(body=data)

    def stager() -> web.Application:
        app = web.Application()
        app.router.add_get("/versions/1", version)
        return app

    ask = Asked(head_node)
    ask.hear("a", role="trainer", first=0)
    body = json.dumps({"version": 1, "digest": made.digest, "url": serve(stager)}).encode()
    assert ask("POST", "/nodes/a/versions", body)[0] == 202
    arrives.set()
    there = json.dumps({"path": made.path}).encode()
    for _ in range(2):
        wait_for(lambda: ask("POST", "/nodes/a/versions", body) == (200, there))
        assert weights.is_whole(made)
        weights.weights_file(Path(made.path)).write_bytes(bytes(len(data)))


NO_FILES = ("other", "..%2F..%2Fhead%2Fruns%2Fr%2Ftoken", "%2Fetc%2Fpasswd", ".hidden", "folder")
STRANGE = (  # no file of the worker's own, or no offset
    "logs/launcher-0.log?offset=0",
    "logs/generation-1.log?offset=0",
    "logs/..%2Ftoken?offset=0",
    "logs/generation-0.log.1?offset=0",
    "timeline/controller-0.jsonl?offset=0",
    "weights/generation-0.log?offset=0",
    "..%2Flogs/generation-0.log?offset=0",
    "logs/generation-0.log",
    "logs/generation-0.log?offset=x",
)
MADE = json.dumps({"version": 1, "digest": "0" * 64, "url": "http://127.0.0.1:1"}).encode()
NO_VERSIONS = ("0", "-1", "x", "1e9", "99999999999", "9" * 5000)
NO_SEGMENTS = (
    "token",
    "..%2Ftoken",
    "000002-000007.bin",
    "2-7",
    "..%2Fpayloads%2F000002-000007",
    f"{'1' * 999}-000001",
)
BEAT = {"pid": 7, "beats": 3, "turns": 2, "progress": 9, "doing": "x" * 1000, "waits_for": None}
OTHERS = {"ready": {"controller-0": {"pid": 1, "url": None}}}  # another process than the worker's own
BOUNDS = ({"first": -1}, {"count": 0}, {"address": "x" * 1000}, {"heartbeats": {"generation-0": BEAT}}, OTHERS)
NO_SHARES = (b"", b"{", b"[]", b'{"role": 1}', b"\xff", *(json.dumps(SAID | fields).encode() for fields in BOUNDS))
LOG = "nodes/b/logs/generation-0.log?offset=0"


@pytest.mark.parametrize(
    ("path", "body", "status", "line"),
    [
        *((f"model/{name}", None, 404, b"the model has no such file") for name in NO_FILES),
        *((f"versions/{number}", None, 400, b"") for number in NO_VERSIONS),
        ("nodes/b/versions", MADE, 410, b"node: has no share of this run"),
        ("nodes/a/versions", MADE, 400, b"node: does not run rank 0"),
        *((f"nodes/a/{path}", b"hello", 400, b"") for path in STRANGE),
        *((f"payloads/{name}?spans=0-1", None, 404, b"") for name in NO_SEGMENTS),
        ("payloads/000002-000008?spans=0-1", None, 404, b"segment 000002-000008 can't be read: No such file or dir"),
        ("payloads/000003-000007?spans=0-1", None, 404, b""),  # a folder
        ("nodes/b", json.dumps(SAID).encode(), 409, b"--head: generation 0 of run r already runs unde"),
        (LOG, b"x", 410, b"node: has no share of this run"),
        (LOG.replace("/b/", "/a/"), b"x" * (2**20 + 1), 413, b""),
        ("nodes/a", b"[" * 200_000, 400, b"body: its JSON is nested too deeply"),
        *(("nodes/a", body, 400, b"") for body in NO_SHARES),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_requests_are_refused_in_one_line(
    ask: Asked, head_node: HeadNode, segment: Path, path: str, body: bytes | None, status: int, line: bytes
) -> None:
    (head_node.model / ".hidden").touch()
    (head_node.model / "folder").mkdir()
    segment.with_name("token.bin").touch()
    segment.with_name("2-7.bin").write_bytes(SEGMENT)
    segment.with_name("000003-000007.bin").mkdir()
    ask.hear("a")
    before = sorted(head_node.run.root.rglob("*"))
    got, content = ask("GET" if body is None else "POST", f"/{path}", body or b"")
    assert (got, content[: len(line)], len(content.splitlines())) == (status, line, 1)
    assert status == 413 or sorted(head_node.run.root.rglob("*")) == before


# -- the process -------------------------------------------------------------------------------------------------------


def test_parts_of_thousands_of_completions_are_one_request_and_an_end_is_told(
    head_node: HeadNode, segment: Path
) -> None:
    segment.write_bytes(data := bytes(40_000))
    values = head_node.config.to_dict()
    write_json(head_node.run.root / "config.json", values | {"launch": values["launch"] | {"stop_timeout_s": 60.0}})
    command = [sys.executable, "-m", "areal_core.run.remote.files", "--run-dir", str(head_node.run.root)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: head_node.run.ready_info("files"))
            head = Head((head_node.run.ready_info("files") or {})["url"], head_node.run.token())
            with closing(head.session()) as session:

                def hear(**fields: Any) -> Any:
                    status, content = session.request("POST", "/nodes/a", json.dumps(SAID | fields).encode())
                    assert status == 200
                    return json.loads(content)["ended"]

                spans = ",".join(f"{at}-{at + 1}" for at in range(0, len(data), 2))
                path = f"/payloads/{segment.stem}?spans={spans}"
                assert session.request("GET", path) == (200, data[: len(data) // 2])
                assert hear() is None
                process.terminate()
                wait_for(hear)
                assert process.poll() is None
                assert hear(over=True) == "otherwise"
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
