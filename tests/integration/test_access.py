"""A run whose generation is on a machine without a common folder: its services serve nobody without the token, and no
request ends one of them."""

import asyncio
import http.client
import json
import re
import signal
import stat
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_core.api.access import authorization
from areal_core.api.controller_client import ControllerClient
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.routes import Routes
from areal_core.run.remote.files import DataServer
from areal_core.storage.rundir import RunDir
from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.slow

ROLES = ("controller", "files", "generation", "publisher", "rewards", "stager", "trainer")
ENDS = ("/finish", "/stop")  # routes of the controller that end the run
# What a page of another site can have a browser send, without asking first.
CROSS_SITE = {"Origin": "https://example.org", "Content-Type": "text/plain", "Cookie": "token=x"}
REFUSED = pytest.mark.parametrize(
    "headers", [{}, authorization("of-another-run"), CROSS_SITE], ids=["none", "another", "site"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    *("version", "path", "digest", "name", "url", "stager", "rows", "kind", "step", "data", "job", "timeout_s"),
    *("update_info", "role", "first", "count", "address", "over", "ready", "heartbeats"),
)
BODIES = st.binary(max_size=64) | (JSON | st.dictionaries(st.sampled_from(FIELDS), JSON)).map(
    lambda value: json.dumps(value).encode()
)
PLACES = st.sampled_from(("0", "1", "-1", "999999", "x", "%00", "..%2F..", "1e9")) | st.text(
    "0123456789abc.-_", min_size=1
)
FUZZED = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("access")
    launch = {"restarts": 0, "remote_roles": "generation"}
    config = tiny(folder / "head", training={"steps": 100_000}, evaluation={"enabled": False}, launch=launch)
    with Launched(config, "r") as launched:
        launched.pid("files")
        where = ("--head", launched.url("files"), "--token-file", launched.run.token_file, "--folder", folder / "node")
        command = ("-m", "areal_core.run.remote_worker", "generation", *where, "--address", "127.0.0.1")
        node = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL)
        try:
            launched.until_step(1)
            yield launched
            step = launched.step()
            launched.until_step(step + 2)  # the run continues, with versions that the stager brings
            launched.launcher.send_signal(signal.SIGINT)
            assert launched.end() == 130, launched.output()
            assert node.wait(240) == 1
        finally:
            node.kill()
            node.wait()
        with closing(TrajectoryLedger(launched.run.ledger, group_size=config.algorithm.group_size)) as ledger:
            assert ledger.notes.incarnation == 0


def ask(
    run: Launched, service: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and text of an answer; `service` is a role, whose process has a ready file, or a URL."""
    where = urllib.parse.urlsplit(service if "://" in service else run.url(service))
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=240)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def token(run: Launched) -> dict[str, str]:
    return authorization(run.run.token())


def routes(service: type[Routes | DataServer]) -> list[tuple[str, str]]:
    async def listed() -> list[tuple[str, str]]:
        app: web.Application = service(MagicMock()).app()
        return [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]

    return asyncio.run(listed())


def stager(run: Launched) -> str:
    """Its URL."""
    client = ControllerClient(run.run)
    try:
        return client.servers()[0]["stager"]
    finally:
        client.close()


def files(run: Launched) -> list[str]:
    """What a node may append to, without what the run's own processes begin in their own time."""
    names = {path.name for folder in (run.run.logs, run.run.timeline) for path in folder.iterdir()}
    return sorted(name for name in names if name.partition("-0.")[0] not in ROLES)


def test_only_the_owner_can_read_the_token(run: Launched) -> None:
    file = run.run.token_file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(run.run.token()) >= 40
    assert RunDir.create(run.config, run.run.info()).token() == run.run.token()  # as a resumed run does
    for pid in run.processes():
        assert run.run.token() not in Path(f"/proc/{pid}/cmdline").read_text()
    texts = [path for path in run.run.root.rglob("*") if path.is_file() and path != file]
    assert [path for path in texts if run.run.token().encode() in path.read_bytes()] == []


@REFUSED
def test_services_refuse_requests_without_the_token(run: Launched, headers: dict[str, str]) -> None:
    body = b'{"version": 0, "path": "/", "digest": "x"}'
    values = {"{name}": "x", "{version}": "1", "{node}": "n", "{kind}": "logs", "{step}": "999999", "{group_id}": "1"}
    values["{segment}"] = "000001-000001"
    asked = {
        "controller": [*routes(Routes), ("GET", "/unknown"), ("OPTIONS", "/versions")],
        "files": [*routes(DataServer), ("GET", "/unknown"), ("PUT", "/run")],
        "generation": [("GET", "/health"), ("POST", "/pause")],
        stager(run): [("POST", "/stage"), ("GET", "/stage"), ("GET", "/unknown")],
    }
    for service, places in asked.items():
        for method, path in places:
            for name, value in values.items():
                path = path.replace(name, value)
            assert ask(run, service, method, path, body, headers)[0] == 401, (service, method, path)
    for service, path in (("controller", "/status"), ("files", "/run"), ("generation", "/health")):
        assert ask(run, service, "GET", path, headers=token(run))[0] == 200
    assert ask(run, stager(run), "GET", "/stage", headers=token(run))[0] == 405


@pytest.mark.parametrize(
    ("service", "method", "path", "body", "error"),
    [
        (
            "controller",
            "GET",
            f"/groups/999999?spans={'7-8,' * 9999}7-8",
            b"",
            "group_id: the payload of group 999999 is no longer stored",
        ),
        ("controller", "POST", "/versions", b"[" * 200_000, "body: its JSON is nested too deeply"),
        ("generation", "POST", "/inference/v1/generate", b"[" * 200_000, "Expected `object`, got `array`"),
    ],
    ids=["spans", "brackets", "brackets to a server"],
)
def test_bad_requests_are_refused(run: Launched, service: str, method: str, path: str, body: bytes, error: str) -> None:
    status, text = ask(run, service, method, path, body, token(run))
    assert (status, error in text) == (400, True)


@pytest.mark.nightly
@pytest.mark.parametrize("service", ["controller", "files", "stager"])
def test_no_request_ends_a_service_or_makes_files(run: Launched, service: str) -> None:
    before = files(run)
    pid = None if service == "stager" else run.pid(service)
    where = stager(run) if service == "stager" else service
    known = {"controller": routes(Routes), "files": routes(DataServer), "stager": [("POST", "/stage")]}[service]

    @FUZZED
    @given(
        route=st.sampled_from([route for route in known if route[1] not in ENDS]),
        places=st.lists(PLACES | st.just("000001-000001"), min_size=3, max_size=3),
        body=BODIES,
    )
    def fuzz(route: tuple[str, str], places: list[str], body: bytes) -> None:
        method, path = route
        if path in ("/servers/{name}", "/batch/{step}", "/checkpoints/{step}"):
            places = ["x"] * 3  # else a server would leave, or a batch be waited for
        quoted = [urllib.parse.quote(place, safe="%") for place in places]
        for number, name in enumerate(re.findall(r"\{\w+\}", path)):
            path = path.replace(name, quoted[number % 3])
        query = f"timeout_s=0&offset={quoted[1]}&spans={quoted[1]}-{quoted[2]}"
        status, text = ask(run, where, method, f"{path}?{query}", body, token(run))
        assert status == 400 if service == "stager" else status < 500, (route, places, body, text)

    fuzz()
    assert files(run) == before
    assert pid is None or run.last_pid(service) == pid
    path, status = {"controller": ("/status", 200), "files": ("/run", 200), "stager": ("/stage", 405)}[service]
    assert ask(run, where, "GET", path, headers=token(run))[0] == status
