"""Faults of what surrounds a run in `make train`: Prefect's server, its worker, the flow run's process, and MLflow.

Each is stopped for a moment, which costs nothing; then one is killed. The death of MLflow or of Prefect's server costs
the view alone; any other ends the command in order, and the run goes on where it ended under a launcher of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from areal_core.config.schema import load_file
from flows.stack import ROOT
from tests.faults.checker import Outcome, check
from tests.faults.history import History
from tests.support.control import environment, processes_of, tiny
from tests.support.runs import Launched, changed, kill_all

KINDS = {  # and what tells them by their command lines
    "flow": "prefect.engine",
    "worker": "flows.worker",
    "mlflow": "mlflow server",
    "prefect": "prefect server",
}
T = TypeVar("T")

_WAIT_S = 120.0
_PAUSE_S = 1.0
_MORE_STEPS = 3


def strike(folder: Path, killed: str) -> Outcome:
    """Stop each kind for a moment, kill the one that is named, and bring the run to its end, in the new `folder`."""
    state = folder / "state"
    state.mkdir(parents=True)
    result = Outcome()
    command = [sys.executable, "-m", "flows.train", "--steps", "10000", *tiny(state)]
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(state), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            run = _wait(lambda: next(iter(state.glob("runs/*")), None))
            history = History(folder / "history.jsonl", run / "ledger.sqlite")
            _wait(lambda: _step(history) >= 2)
            for kind in KINDS:
                _signal(result, state, kind, signal.SIGSTOP)
                time.sleep(_PAUSE_S)
                _signal(result, state, kind, signal.SIGCONT)
                before = _step(history)
                _wait(lambda before=before: _step(history) > before)
            _signal(result, state, killed, signal.SIGKILL)
            if killed in ("mlflow", "prefect"):  # which the run goes on without
                before = _step(history)
                _wait(lambda: _step(history) > before + 2)
                process.terminate()
            process.wait(_WAIT_S)
            result.findings.orphans += [f"{pid} {line}" for pid, line in processes_of(state).items()]
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            result.findings.unresumable.append(f"{killed}: {error}")
            return result
        finally:
            kill_all(lambda: processes_of(state))
            process.wait()
            result.output = Path(output.name).read_text()
    _resume(result, killed, run, history)
    return result


def _resume(result: Outcome, killed: str, run: Path, history: History) -> None:
    """The run goes on without all that, a few steps to its end."""
    config = load_file(run / "config.json")
    steps = max(int(file.parent.name[1:]) for file in run.glob("weights/v*/manifest.json")) + 2 * _MORE_STEPS
    with Launched(changed(config.to_dict(), training={"steps": steps}), run.name) as launched:
        status = launched.launcher.wait(_WAIT_S)
        output = launched.output()
    if status:
        result.findings.unresumable.append(f"{killed}: {output.splitlines()[-1]}")
        return
    store = Path(config.storage.url) / "runs" / run.name
    found = check(run, store, history.entries(), steps=steps)
    found.orphans += result.findings.orphans
    result.findings = found


def _step(history: History) -> int:
    seen = history.look()
    return max(seen.versions, default=0) if seen else 0


def _signal(result: Outcome, state: Path, kind: str, signum: signal.Signals) -> None:
    """Send it to the processes of a kind."""
    for pid, line in processes_of(state).items():
        if KINDS[kind] in line:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
    if signum is not signal.SIGCONT:
        result.faults[f"{kind} {signum.name}"] += 1


def _wait(look: Callable[[], T | None]) -> T:
    """What `look` finds, once it finds something. Raises TimeoutError."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"not within {_WAIT_S:g} s")
