"""Roles of a run taken over by other commands, all on one machine; tests/hosts has them on machines of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from areal_core.config.schema import RunConfig
from tests.support.runs import TIMEOUT_S, Launched, tiny

pytestmark = pytest.mark.slow

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`python -m areal_core.run.remote_worker` for a run, at its start."""
    started: list[subprocess.Popen[str]] = []

    def command(head: Launched, role: str, *options: object) -> subprocess.Popen[str]:
        where = ("--run-dir", head.run.root, "--address", "127.0.0.1")
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "areal_core.run.remote_worker", role, *map(str, (*where, *options))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield command
    for one in started:
        with suppress(ProcessLookupError):
            one.kill()
        one.wait()


def divided(state: Path, steps: int) -> RunConfig:
    training = {"ranks": 2, "hosts": 2, "steps": steps}
    return tiny(state, training=training, launch={"elsewhere": "both", "devices": 3, "stop_timeout_s": 10.0})


def test_a_run_whose_roles_are_elsewhere(tmp_path: Path, start: Start) -> None:
    with Launched(divided(tmp_path, 4), "divided") as head:
        hosts = [start(head, "generation"), *(start(head, "trainer", "--node", node) for node in range(2))]
        head.finished()
        outputs = [host.communicate(timeout=TIMEOUT_S)[0] for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0, 0], outputs
        assert all("run divided has ended" in output for output in outputs)


def test_the_end_of_a_part_and_of_the_head(tmp_path: Path, start: Start) -> None:
    with Launched(divided(tmp_path, 4000), "stopped") as head:
        hosts = [start(head, "generation"), *(start(head, "trainer", "--node", node) for node in range(2))]
        head.until_step(2)
        part = psutil.Process(hosts[2].pid).children(recursive=True)
        assert len(part) == 2  # torchrun's agent and its rank
        hosts[2].send_signal(signal.SIGTERM)
        output, _ = hosts[2].communicate(timeout=TIMEOUT_S)
        assert (hosts[2].returncode, output.splitlines()[-1]) == (143, "areal: stopped")
        assert not [one for one in part if one.is_running()]
        head.launcher.send_signal(signal.SIGTERM)
        assert head.end() == 143
        for host in hosts[:2]:
            output, _ = host.communicate(timeout=TIMEOUT_S)
            assert host.returncode == 1
            assert output.splitlines()[-1] == "areal: error: run stopped has ended and left no summary"
