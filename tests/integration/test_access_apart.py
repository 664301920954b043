"""The services by which other machines take part in a run: nobody without its token is served, whatever
he sends, and nothing that anybody sends ends one of them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.api.access import authorization
from areal_core.api.controller_client import ControllerClient
from areal_core.run.remote.files import Files
from tests.support.access import BODIES, CROSS_SITE, FUZZED, PLACES, ask, token
from tests.support.runs import Launched, tiny

pytestmark = [pytest.mark.slow, pytest.mark.cpu_seconds(40)]

SERVICES = ("controller", "files", "generation", "publisher", "rewards", "stager", "trainer")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A run whose generation is on another machine than the head node."""
    folder = tmp_path_factory.mktemp("apart")
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
            launched.until_step(step + 2)  # it goes on, with versions that the stager brings
            launched.launcher.send_signal(signal.SIGINT)
            assert launched.end() == 130, launched.output()
            assert node.wait(30) == 1
        finally:
            node.kill()
            node.wait()


def routes() -> list[tuple[str, str]]:
    async def listed() -> list[tuple[str, str]]:
        app = Files(MagicMock()).app()
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
    """What a node may append to, but for what the run's own processes begin with in their own time."""
    names = {path.name for folder in (run.run.logs, run.run.timeline) for path in folder.iterdir()}
    return sorted(name for name in names if name.partition("-0.")[0] not in SERVICES)


@pytest.mark.parametrize("headers", [{}, authorization("of-another-run"), CROSS_SITE], ids=["none", "another", "site"])
def test_no_route_of_the_head_nodes_files_takes_a_request_without_it(run: Launched, headers: dict[str, str]) -> None:
    values = {"{name}": "model.safetensors", "{version}": "1", "{node}": "n", "{kind}": "logs"}
    values["{segment}"] = "000001-000001"
    for method, path in (*routes(), ("GET", "/unknown"), ("PUT", "/run")):
        asked = path
        for name, value in values.items():
            asked = asked.replace(name, value)
        assert ask(run, "files", method, asked, b"{}", headers)[0] == 401, (method, path)
    assert ask(run, "files", "GET", "/run", headers=token(run))[0] == 200


@pytest.mark.parametrize("headers", [{}, authorization("of-another-run"), CROSS_SITE], ids=["none", "another", "site"])
def test_no_route_of_a_stager_takes_a_request_without_it(run: Launched, headers: dict[str, str]) -> None:
    where = stager(run)
    for method, path in (("POST", "/stage"), ("GET", "/stage"), ("GET", "/unknown")):
        assert ask(run, where, method, path, b'{"version": 0, "path": "", "sha256": ""}', headers)[0] == 401
    assert ask(run, where, "GET", "/stage", headers=token(run))[0] == 405


@pytest.mark.parametrize("known", [False, True], ids=["without the token", "with the token"])
def test_whatever_is_sent_the_files_are_served_on(run: Launched, known: bool) -> None:
    pid, before = run.pid("files"), files(run)

    @FUZZED
    @given(
        route=st.sampled_from(routes()),
        places=st.lists(PLACES, min_size=3, max_size=3),
        segment=PLACES | st.just("000001-000001"),
        body=BODIES,
    )
    def fuzz(route: tuple[str, str], places: list[str], segment: str, body: bytes) -> None:
        method, path = route
        for name, place in zip(("{name}", "{node}", "{kind}"), places, strict=True):
            path = path.replace(name, urllib.parse.quote(place, safe="%"))
        path = path.replace("{version}", urllib.parse.quote(places[0], safe="%")).replace("{segment}", segment)
        query = f"offset={places[1]}&spans={places[1]}-{places[2]}"
        status, text = ask(run, "files", method, f"{path}?{query}", body, token(run) if known else {})
        assert status < 500 if known else status == 401, (route, places, body, text)

    fuzz()
    assert run.last_pid("files") == pid
    assert files(run) == before
    assert ask(run, "files", "GET", "/run", headers=token(run))[0] == 200


@pytest.mark.parametrize("known", [False, True], ids=["without the token", "with the token"])
@pytest.mark.dear
def test_whatever_is_sent_a_stager_serves_on(run: Launched, known: bool) -> None:
    where = stager(run)

    @FUZZED
    @given(body=BODIES)
    def fuzz(body: bytes) -> None:
        status, text = ask(run, where, "POST", "/stage", body, token(run) if known else {})
        assert status == (400 if known else 401), (body, text)

    fuzz()
    assert ask(run, where, "GET", "/stage", headers=token(run))[0] == 405
