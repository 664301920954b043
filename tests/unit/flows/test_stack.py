"""Ports, the environment's precedence, the one stack of a checkout, and processes that end together."""

import fcntl
import json
import os
import random
import re
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_core.errors import ConfigError, ProcessError
from flows import stack
from flows.services import Services

_VARIABLES = ("PREFECT_PORT", "PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_HOME", "MLFLOW_TRACKING_URI")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"STATE": tmp_path, "LOGS": tmp_path / "logs", "WORKER_READY": tmp_path / "ready"}.items():
        monkeypatch.setattr(stack, name, value)
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def _free() -> int:
    """A port that nobody listens at, and that the kernel gives to no connection of another process meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, lowest)
        if stack.is_free(port):
            return port


def test_default_port_that_is_taken_is_passed_over(taken: int) -> None:
    default = _free()
    assert stack._port("PREFECT_PORT", default) == default
    for unfit in (taken, default):  # the server of the first has not bound its port yet
        other = stack._port("PREFECT_PORT", unfit)
        assert other not in (default, taken)
        assert stack.is_free(other)


def test_port_asked_for_is_taken_or_refused(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = _free()
    monkeypatch.setenv("PREFECT_PORT", str(free))
    assert stack._port("PREFECT_PORT", 1) == free
    in_use = "port {} is in use"
    for asked, said in ((free, in_use.format(free)), (taken, in_use.format(taken)), ("http", "must be a port")):
        monkeypatch.setenv("PREFECT_PORT", str(asked))
        with pytest.raises(ConfigError, match=f"^PREFECT_PORT: {said}"):
            stack._port("PREFECT_PORT", 1)


def test_environment_of_prefect_gives_way_to_the_users(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack.prefect_environment("u")["PREFECT_HOME"] == str(state / "prefect")
    monkeypatch.setenv("PREFECT_HOME", "/elsewhere")
    assert stack.prefect_environment("u")["PREFECT_HOME"] == "/elsewhere"
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.setenv("PREFECT_PROFILE", "mine")
    assert "PREFECT_HOME" not in stack.prefect_environment(None)
    monkeypatch.setenv("PREFECT_API_URL", "https://theirs/api")
    assert stack.prefect_environment("http://ours/api")["PREFECT_API_URL"] == "https://theirs/api"


def test_servers_that_the_environment_names_are_not_started(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://theirs/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://theirs")
    started: list[str] = []

    class Recorded(Services):
        def start(self, name: str, *_: object, **__: object) -> None:  # type: ignore[override]
            started.append(name)

        def until_ready(self, probes) -> None:
            assert set(probes) == {"worker"}

    made = stack._start(Recorded(cwd=state, logs=state), "up")
    assert started == ["worker"]
    assert (made.prefect_api, made.mlflow_uri) == ("https://theirs/api", "https://theirs")


@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_credentials_in_an_address_are_refused(variable: str, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be in stack.json, and on the terminal."""
    monkeypatch.setenv(variable, "https://me:hunter2@theirs/api")
    with pytest.raises(ConfigError, match=f"^{variable}: must hold no user or password; ") as refused:
        stack._start(Services(cwd=state, logs=state), "up")
    assert "hunter2" not in str(refused.value)


def test_a_stack_runs_only_while_its_lock_is_held(state: Path) -> None:
    assert stack.running() is None
    told = {"owner": "up", "pid": 1, "prefect_api": "http://127.0.0.1:1/api", "mlflow_uri": "http://127.0.0.1:2"}
    (state / "stack.json").write_text(json.dumps(told))
    (state / "stack.lock").touch()
    assert stack.running() is None  # left by one that is gone
    with (state / "stack.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert stack.running() == stack.Stack(**told)  # type: ignore[arg-type]
        with pytest.raises(ProcessError, match="servers already run in"), stack._lock():
            pass


def services_of(folder: Path) -> Services:
    return Services(cwd=folder, logs=folder)


def test_service_is_started_again_as_often_as_it_may(tmp_path: Path) -> None:
    with services_of(tmp_path) as services:
        services.start("brief", [sys.executable, "-c", "raise SystemExit(3)"], {}, restarts=2)
        services.start("last", [sys.executable, "-c", "import time; time.sleep(60)"], {})  # whose place stays the last
        happenings = services.watch()
        for _ in range(2):
            assert re.match(r"brief exited with code 3: .*; restarting it", next(happenings))
            assert [service.process.name for service in services._services] == ["brief", "last"]
        with pytest.raises(ProcessError, match=r"^brief exited with code 3"):
            next(happenings)


def test_leaving_ends_every_process_of_every_service(tmp_path: Path) -> None:
    """Even of one whose child ignores SIGTERM, as a server's worker may."""
    child = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with services_of(tmp_path) as services:
        services.start("family", [sys.executable, "-c", parent], {})
        (family,) = services._services
        services.until_ready({"family": lambda: family.process.log.path.read_text().endswith("\n")})
        pidfd = os.pidfd_open(int(family.process.log.path.read_text()))
    assert select.select([pidfd], [], [], 10)[0], "the child outlived the stack"
    os.close(pidfd)
