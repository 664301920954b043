"""Each process of `make train` is killed in the middle of its run: what follows is a run that recovers, or an end that
says in one line what died; never a hang, a process that nobody owns, or a failure that looks like success."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from mlflow import MlflowClient

from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import Outbox
from flows.stack import ROOT
from tests.support.control import environment, processes_of, tiny
from tests.support.runs import kill_all

T = TypeVar("T")

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

_TIMEOUT_S = 240.0  # for whatever a test waits for
_ENDLESS = 10_000  # steps of a run that only what is done to it ends
_STEPS = 60  # some seconds


class Recorded(NamedTuple):
    """A flow run, as Prefect's database has it after the end."""

    state: str
    attempts: int


class Train:
    """`make train` at work. A context: whatever is left at its end is killed."""

    def __init__(self, state: Path, steps: int, *settings: str) -> None:
        self._state = state
        self._before = self._runs()
        self._output = (state / f"train-{len(self._before)}.txt").open("w+")
        command = [sys.executable, "-m", "flows.train", "--steps", str(steps), *tiny(state), *settings]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(state),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Train:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        kill_all(lambda: processes_of(self._state))
        self.process.wait()
        self._output.close()
        if failure is not None:  # a flow run that was cut off would go on for ever in this database
            shutil.rmtree(self._state / "prefect", ignore_errors=True)

    def output(self) -> str:
        return Path(self._output.name).read_text()

    def wait_for(self, what: str, condition: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.05)
        raise AssertionError(f"not within {_TIMEOUT_S:g} s: {what}\n{self.output()}\n{processes_of(self._state)}")

    def until_step(self, step: int) -> None:
        """Return once this policy version, or a later one, is published."""

        def published() -> bool:
            assert self.process.poll() is None, self.output()
            newest = next((weights.newest(run.weights) for run in self._runs() - self._before), None)
            return newest is not None and newest.version >= step

        self.wait_for(f"step {step}", published)

    @property
    def run(self) -> RunDir:
        (run,) = self._runs() - self._before
        return run

    def pid(self, command: str, *, but: int = 0) -> int:
        """The one process of this stack, other than `but`, whose command line holds `command`."""

        def only() -> int | None:
            found = [pid for pid, line in processes_of(self._state).items() if command in line and pid != but]
            return found[0] if len(found) == 1 else None

        return self.wait_for(f"one process {command}", only)

    def kill(self, command: str, *, but: int = 0) -> int:
        pid = self.pid(command, but=but)
        os.kill(pid, signal.SIGKILL)
        return pid

    def end(self) -> int:
        """The exit status; nothing that this command started may be left then, nor a flow run that seems to go on."""
        status = self.process.wait(_TIMEOUT_S)
        assert processes_of(self._state) == {}, self.output()
        assert {state for state, _ in self.flow_runs()[:-1]} <= {"Completed", "Failed", "Crashed", "Cancelled"}
        return status

    def completed(self, attempts: int = 1) -> None:
        assert self.end() == 0, self.output()
        assert self.flow_runs()[-1] == Recorded("Completed", attempts)
        assert self.run.summary.exists()
        assert self.output().count(f"{_STEPS} (stop reason: steps)") == 1

    def failed(self, line: str, *, status: int = 1) -> None:
        """The end says `line`, and only the end has it."""
        assert self.end() == status, self.output()
        assert not self.run.summary.exists()
        assert [said for said in self.output().splitlines() if line in said] == self.output().splitlines()[-1:]

    def flow_runs(self) -> list[Recorded]:
        """Oldest first: this one is the last."""
        with closing(sqlite3.connect(self._state / "prefect" / "prefect.db")) as database:
            rows = database.execute("SELECT state_name, run_count FROM flow_run ORDER BY created")
            return [Recorded(*row) for row in rows]

    def tracked(self) -> str:
        """The status of the run in MLflow, whose server has ended: its database tells."""
        run_id = self.run.info().tracking_run_id
        assert run_id is not None
        return MlflowClient(f"sqlite:///{self._state}/mlflow/mlflow.db").get_run(run_id).info.status

    def unsent(self) -> int:
        with closing(Outbox(self.run.outbox, self.run.info().run_id)) as outbox:
            return outbox.unsent()

    def _runs(self) -> set[RunDir]:
        return {RunDir(file.parent) for file in self._state.glob("runs/*/run.json")}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder, so that every test also shows that what the one before has left does no harm."""
    return tmp_path_factory.mktemp("state")


def test_prefect_server_dies_and_is_started_again(state: Path) -> None:
    with Train(state, _STEPS) as train:
        train.until_step(2)
        train.kill("prefect server")
        train.completed()
        assert train.output().count("prefect-server was killed by SIGKILL") == 1
        assert train.tracked() == "FINISHED"


def test_prefect_server_hangs_until_after_the_end_of_the_run(state: Path) -> None:
    with Train(state, _STEPS) as train:
        train.until_step(2)
        server = train.pid("prefect server")
        os.kill(server, signal.SIGSTOP)
        train.wait_for("the summary", train.run.summary.exists)
        time.sleep(70)  # longer than a client of Prefect's waits for a response
        os.kill(server, signal.SIGCONT)
        train.completed()
        assert train.tracked() == "FINISHED"


@pytest.mark.parametrize("command", ["mlflow server", "uvicorn"], ids=["launcher", "server"])
def test_mlflow_dies_and_the_run_completes(state: Path, command: str) -> None:
    with Train(state, _STEPS, "tracking.flush_timeout_s=2.0") as train:
        train.until_step(2)
        train.kill(command)
        train.completed()
        assert len([line for line in train.output().splitlines() if line.startswith("mlflow ")]) == 1
        assert "not yet tracked" in train.output()
        assert train.unsent() > 0


def test_worker_dies(state: Path) -> None:
    with Train(state, _ENDLESS) as train:
        train.until_step(2)
        train.kill("flows.worker")
        train.failed("areal: error: worker was killed by SIGKILL")
        assert train.tracked() == "KILLED"


def test_flow_process_dies(state: Path) -> None:
    with Train(state, _ENDLESS) as train:
        train.until_step(2)
        train.kill("prefect.engine")
        train.failed("Crashed: ")
        assert train.flow_runs()[-1].state == "Crashed"
        assert train.tracked() == "KILLED"


def test_supervisor_of_the_servers_dies(state: Path) -> None:
    with Train(state, _ENDLESS) as train:
        train.until_step(2)
        train.kill("flows.stack serve")
        train.failed("areal: error: the supervisor of the servers is gone")


def test_make_train_itself_dies(state: Path) -> None:
    with Train(state, _ENDLESS) as train:
        train.until_step(2)
        train.process.kill()
        train.wait_for("all is gone", lambda: not processes_of(state))
        assert train.flow_runs()[-1].state != "Completed"
        assert not train.run.summary.exists()
        assert train.tracked() == "KILLED"


def test_trainer_dies_and_the_flow_is_tried_again(state: Path) -> None:
    with Train(state, _STEPS, "launch.restarts=0") as train:
        train.until_step(2)
        train.kill("training.trainer")
        train.completed(attempts=2)
        assert train.tracked() == "FINISHED"
