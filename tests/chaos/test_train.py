"""Each process of `areal train` is killed in the middle of its run: what follows is a run that recovers, or an end that
says in one line what died; never a hang, a process that nobody owns, or a failure that looks like success."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.stack import ENDLESS, Train
from tests.support.control import processes_of

pytestmark = pytest.mark.chaos

_STEPS = 60  # some seconds


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder, so that every test also shows that what the one before has left does no harm."""
    return tmp_path_factory.mktemp("state")


def test_prefect_server_dies_and_is_started_again(state: Path) -> None:
    with Train(state, _STEPS) as train:
        train.until_step(2)
        train.kill("flows.prefect_server")
        train.completed(_STEPS)
        assert train.output().count("prefect-server was killed by SIGKILL") == 1


def test_prefect_server_hangs_until_after_the_end_of_the_run(state: Path) -> None:
    with Train(state, _STEPS) as train:
        train.until_step(2)
        server = train.pid("flows.prefect_server")
        os.kill(server, signal.SIGSTOP)
        train.wait_for("the summary", train.run.summary.exists)
        time.sleep(70)  # longer than a client of Prefect's waits for a response
        os.kill(server, signal.SIGCONT)
        train.completed(_STEPS)


@pytest.mark.parametrize("command", ["mlflow server", "uvicorn"], ids=["launcher", "server"])
def test_mlflow_dies_and_the_run_completes(state: Path, command: str) -> None:
    with Train(state, _STEPS, "tracking.flush_timeout_s=2.0") as train:
        train.until_step(2)
        train.kill(command)
        train.completed(_STEPS, tracked=False)
        assert len([line for line in train.output().splitlines() if line.startswith("mlflow ")]) == 1


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("flows.worker", "areal: error: worker was killed by SIGKILL"),
        ("prefect.engine", "Crashed: "),
        ("flows.stack train", "areal: error: the servers' supervisor has died"),
    ],
)
def test_death_of_what_runs_the_flow_ends_the_command_with_one_line(state: Path, command: str, line: str) -> None:
    with Train(state, ENDLESS) as train:
        train.until_step(2)
        train.kill(command)
        assert train.end() == 1, train.output()
        assert not train.run.summary.exists()
        assert [said for said in train.output().splitlines() if line in said] == train.output().splitlines()[-1:]
        assert train.tracked() == "KILLED"


def test_make_train_itself_dies(state: Path) -> None:
    with Train(state, ENDLESS) as train:
        train.until_step(2)
        train.process.kill()
        train.wait_for("all is gone", lambda: not processes_of(state))
        assert train.flow_runs()[-1].state != "Completed"
        assert not train.run.summary.exists()
        assert train.tracked() == "KILLED"
