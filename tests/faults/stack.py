"""Faults of what surrounds a run in `areal train`: Prefect's server, its worker, the flow run's process, and MLflow.

Each is stopped for a moment, which costs nothing; then one is killed. The death of MLflow or of Prefect's server costs
the view alone; any other ends the command in order, and the run goes on where it ended under a launcher of its own.
"""

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

from mlflow import MlflowClient

from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from flows.places import FILES
from tests.faults.checker import Outcome, check
from tests.faults.history import History
from tests.support.control import environment, processes_of, tiny
from tests.support.processes import kill_all, wait_for
from tests.support.runs import Launched, changed

KINDS = {  # and what tells them by their command lines
    "flow": "prefect.engine",
    "worker": "flows.worker",
    "mlflow": "mlflow server",
    "prefect": "flows.prefect_server",
}
ENDLESS = 10_000  # steps of a run that only what is done to it ends
T = TypeVar("T")

_WAIT_S = 240.0  # for whatever is waited for
_PAUSE_S = 1.0
_MORE_STEPS = 6


class Recorded(NamedTuple):
    """A flow run, as Prefect's database has it after the end."""

    state: str
    attempts: int


class Train:
    """`areal train` at work. A context: whatever is left at its end is killed."""

    def __init__(self, state: Path, steps: int, *settings: str) -> None:
        self._state = state
        self._before = self._runs()
        self._output = (state / f"train-{len(self._before)}.txt").open("w+")
        command = [sys.executable, "-m", "flows.cli", "train", f"training.steps={steps}", *tiny(state), *settings]
        self.process = subprocess.Popen(
            command,
            cwd=FILES,
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
        return wait_for(condition, lambda: f"{what}\n{self.output()}\n{processes_of(self._state)}", _WAIT_S)

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

    def pid(self, command: str) -> int:
        """The one process of this stack whose command line holds `command`."""

        def only() -> int | None:
            found = [pid for pid, line in processes_of(self._state).items() if command in line]
            return found[0] if len(found) == 1 else None

        return self.wait_for(f"one process {command}", only)

    def kill(self, command: str) -> None:
        os.kill(self.pid(command), signal.SIGKILL)

    def end(self) -> int:
        """The exit status; nothing that this command started may be left then, nor a flow run that seems to go on."""
        status = self.process.wait(_WAIT_S)
        assert processes_of(self._state) == {}, self.output()
        assert {state for state, _ in self.flow_runs()[:-1]} <= {"Completed", "Failed", "Crashed", "Cancelled"}
        return status

    def completed(self, steps: int, *, tracked: bool = True) -> None:
        assert self.end() == 0, self.output()
        assert self.flow_runs()[-1] == Recorded("Completed", 1)
        assert self.run.summary.exists()
        assert self.output().count(f"{steps} (stop reason: steps)") == 1
        assert not tracked or self.tracked() == "FINISHED"

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

    def _runs(self) -> set[RunDir]:
        return {RunDir(file.parent) for file in self._state.glob("runs/*/run.json")}


def strike(folder: Path, killed: str) -> Outcome:
    """Stop each kind for a moment, kill the one that is named, and bring the run to its end, in the new `folder`."""
    state, result = folder / "state", Outcome()
    state.mkdir(parents=True)
    with Train(state, ENDLESS) as train:
        try:
            train.until_step(2)
            run, config = train.run, train.run.config()
            history = History(run.ledger)

            def progresses() -> None:
                step = _step(history)
                train.wait_for("a step", lambda: _step(history) > step)

            for kind, command in KINDS.items():
                for pid in [pid for pid, line in processes_of(state).items() if command in line]:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(_PAUSE_S)
                    os.kill(pid, signal.SIGCONT)
                result.faults[f"{kind} SIGSTOP"] += 1
                progresses()
            train.kill(KINDS[killed])
            result.faults[f"{killed} SIGKILL"] += 1
            if killed in ("mlflow", "prefect"):  # which the run goes on without
                progresses()
                train.process.terminate()
            train.process.wait(_WAIT_S)
            result.findings["orphans"] += [f"{pid} {line}" for pid, line in processes_of(state).items()]
        except (AssertionError, subprocess.TimeoutExpired) as error:
            result.findings["unresumable"].append(f"{killed}: {error}")
            return result
        finally:
            result.output = train.output()
    newest = weights.newest(run.weights)  # the run goes on without all that, a few steps to its end
    steps = (newest.version if newest else 0) + _MORE_STEPS
    with Launched(changed(config.to_dict(), training={"steps": steps}), run.root.name) as launched:
        status = launched.launcher.wait(_WAIT_S)
        output = launched.output()
    if status:
        result.findings["unresumable"].append(f"{killed}: {output.splitlines()[-1]}")
        return result
    found = check(run.root, Path(config.storage.url) / "runs" / run.root.name, history.looks, steps=steps)
    found["orphans"] += result.findings["orphans"]
    result.findings = found
    return result


def _step(history: History) -> int:
    seen = history.look()
    return max(seen.versions, default=0) if seen else 0
