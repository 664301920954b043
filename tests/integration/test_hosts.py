"""Remote workers of a run, all on one machine; tests/hosts has them on machines of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from areal_core.tracking.timeline import read_timeline
from tests.support.runs import TIMEOUT_S, Launched, tiny

pytestmark = [pytest.mark.slow, pytest.mark.recovery, pytest.mark.cpu_seconds(40)]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`python -m areal_core.run.remote_worker` for a run, at its start."""
    started: list[subprocess.Popen[str]] = []

    def command(run: Launched, role: str, *options: object) -> subprocess.Popen[str]:
        where = ("--run-dir", run.run.root, "--address", "127.0.0.1")
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


@pytest.mark.nightly
def test_a_run_of_remote_workers_goes_on_after_one_of_them_was_ended(tmp_path: Path, start: Start) -> None:
    launch = {"remote_roles": "both", "devices": 3, "stop_timeout_s": 10.0}
    training = {"ranks": 2, "hosts": 2, "steps": 24}
    config = tiny(tmp_path, training=training, launch=launch, evaluation={"enabled": False})
    with Launched(config, "divided") as run:
        hosts = [start(run, "generation"), *(start(run, "trainer", "--node", node) for node in range(2))]
        run.until_step(2)
        ended = hosts.pop()
        sweeper, *part = sorted(
            psutil.Process(ended.pid).children(recursive=True),
            key=lambda one: "sweeper" not in " ".join(one.cmdline()),
        )
        assert len(part) == 2  # torchrun's agent and its rank
        ended.send_signal(signal.SIGTERM)
        output, _ = ended.communicate(timeout=TIMEOUT_S)
        assert (ended.returncode, output.splitlines()[-1]) == (143, "areal: stopped")
        assert not [one for one in part if one.is_running()]
        sweeper.wait(TIMEOUT_S)  # has nothing left to do
        hosts.append(start(run, "trainer", "--node", 1))
        run.finished()
        outputs = [host.communicate(timeout=TIMEOUT_S)[0] for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0, 0], outputs
        assert all("run divided has ended" in output for output in outputs)


def test_reward_workers_of_other_machines_come_die_and_leave(tmp_path: Path, start: Start) -> None:
    config = tiny(tmp_path, training={"steps": 150}, launch={"stop_timeout_s": 10.0}, evaluation={"enabled": False})
    with Launched(config, "judged") as run:
        stays, leaves = start(run, "rewards", "--workers", 2), start(run, "rewards", "--first", 2, "--workers", 1)
        killed, _ = run.pid("rewards", 1), run.pid("rewards", 3)
        run.until_step(run.step() + 2)
        os.kill(killed, signal.SIGKILL)
        run.pid("rewards", 1, but=killed)
        leaves.send_signal(signal.SIGUSR1)
        output, _ = leaves.communicate(timeout=TIMEOUT_S)
        assert (leaves.returncode, output.splitlines()[-1]) == (
            0,
            "this machine leaves the run: it was asked to, by SIGUSR1",
        )
        since = time.time()
        run.until_step(run.step() + 2)
        run.finished()
        output, _ = stays.communicate(timeout=TIMEOUT_S)
        assert (stays.returncode, output.splitlines()[-1]) == (0, "run judged has ended")
        assert "rewards-1 was killed by SIGKILL: restart 1 of 2" in output
    judged = [span for span in read_timeline(run.run.timeline) if span.kind == "score"]
    assert {span.process for span in judged} == {f"rewards-{place}" for place in range(4)}
    assert {span.process for span in judged if span.start_s > since} == {f"rewards-{place}" for place in range(3)}
