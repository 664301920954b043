"""The services of a run at work: nobody without its token is served, whatever he sends, and nothing that anybody sends
ends one of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.api.access import authorization
from areal_core.controller.routes import Routes
from areal_core.rollout.ledger import TrajectoryLedger
from tests.support.access import BODIES, CROSS_SITE, FUZZED, PLACES, ask, token
from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.slow

SERVICES = ("controller", "generation")
ENDS = ("/finish", "/stop")  # of the controller: with the token they end the run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("access")
    config = tiny(folder, training={"steps": 100_000}, evaluation={"enabled": False}, launch={"restarts": 0})
    with Launched(config, "r") as launched:
        launched.until_step(1)
        for service in SERVICES:
            launched.pid(service)
        yield launched
        step = launched.step()
        launched.until_step(step + 2)  # it goes on
        launched.launcher.send_signal(signal.SIGINT)
        assert launched.end() == 130, launched.output()
        with closing(TrajectoryLedger(launched.run.ledger, group_size=config.algorithm.group_size)) as ledger:
            assert ledger.incarnation == 0


def routes() -> list[tuple[str, str]]:
    """Those of the controller."""
    app = Routes(MagicMock()).app()
    return [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]


@pytest.mark.dear
def test_the_token_is_its_users_alone(run: Launched) -> None:
    file = run.run.token_file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(run.run.token()) >= 40
    for pid in run.processes():
        assert run.run.token() not in Path(f"/proc/{pid}/cmdline").read_text()
    texts = [path for path in run.run.root.rglob("*") if path.is_file() and path != file]
    assert [path for path in texts if run.run.token().encode() in path.read_bytes()] == []


@pytest.mark.parametrize("headers", [{}, authorization("of-another-run"), CROSS_SITE], ids=["none", "another", "site"])
def test_no_route_of_the_controller_takes_a_request_without_it(run: Launched, headers: dict[str, str]) -> None:
    for method, path in (*routes(), ("GET", "/unknown"), ("OPTIONS", "/versions")):
        asked = path.replace("{step}", "999999").replace("{group_id}", "1").replace("{name}", "generation-0")
        status, text = ask(run, "controller", method, asked, b'{"version": 0, "path": "/", "digest": "x"}', headers)
        assert status == 401, (method, path, text)
    assert ask(run, "controller", "GET", "/status", headers=token(run))[0] == 200


def test_the_servers_of_a_run_want_it_too(run: Launched) -> None:
    assert ask(run, "generation", "GET", "/health")[0] == 401
    assert ask(run, "generation", "POST", "/pause")[0] == 401
    assert ask(run, "generation", "GET", "/health", headers=token(run))[0] == 200


def test_the_controller_is_not_made_to_call_others(run: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(1.0)
        body = json.dumps({"name": "x", "url": f"http://127.0.0.1:{listening.getsockname()[1]}"}).encode()
        assert ask(run, "controller", "POST", "/servers", body)[0] == 401
        with pytest.raises(TimeoutError):
            listening.accept()


def test_parts_of_thousands_of_completions_may_be_asked_for(run: Launched) -> None:
    spans = ",".join(f"{at}-{at + 1}" for at in range(10_000))
    status, text = ask(run, "controller", "GET", f"/groups/999999?spans={spans}", headers=token(run))
    assert (status, text) == (400, "group_id: no payload is kept for group 999999")


def test_a_body_of_brackets_is_refused(run: Launched) -> None:
    status, text = ask(run, "controller", "POST", "/versions", b"[" * 200_000, token(run))
    assert (status, text) == (400, "body: is nested too deeply")
    status, text = ask(run, "generation", "POST", "/inference/v1/generate", b"[" * 200_000, token(run))
    assert status == 400
    assert "the body is not JSON: " in text


def test_version_0_is_the_base_model(run: Launched) -> None:
    body = b'{"version": 0, "path": "/", "digest": "x"}'
    status, text = ask(run, "controller", "POST", "/versions", body, token(run))
    assert (status, text) == (400, "version: must be 1 or more, as version 0 is the base model, got 0")


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.dear
def test_what_is_no_request_at_all_ends_no_service(run: Launched, service: str) -> None:
    pid, where = run.pid(service), urllib.parse.urlsplit(run.url(service))

    @FUZZED
    @given(
        sent=st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: b"POST /versions HTTP/1.1\r\n" + data)
    )
    def fuzz(sent: bytes) -> None:
        with socket.create_connection((str(where.hostname), where.port or 0), timeout=30) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(100)
            assert not answer or answer.split()[1] in (b"400", b"401"), answer

    fuzz()
    assert run.last_pid(service) == pid
    assert os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("known", [False, True], ids=["without the token", "with the token"])
@pytest.mark.dear
def test_whatever_is_sent_the_controller_serves_on(run: Launched, known: bool) -> None:
    pid = run.pid("controller")
    asked = [route for route in routes() if not (known and route[1] in ENDS)]

    @FUZZED
    @given(route=st.sampled_from(asked), place=PLACES, body=BODIES)
    def fuzz(route: tuple[str, str], place: str, body: bytes) -> None:
        method, path = route
        if known and path in ("/servers/{name}", "/batch/{step}", "/checkpoints/{step}"):
            place = "x"  # else a server would leave, or a batch be waited for
        for name in ("{step}", "{group_id}", "{name}"):
            path = path.replace(name, urllib.parse.quote(place, safe="%"))
        status, text = ask(run, "controller", method, f"{path}?timeout_s=0", body, token(run) if known else {})
        if known:
            assert status != 500, (route, place, body, text)
        else:
            assert status == 401, (route, place, body, text)

    fuzz()
    assert run.last_pid("controller") == pid
    assert ask(run, "controller", "GET", "/status", headers=token(run))[0] == 200
