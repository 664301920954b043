"""Faults of messages: requests and responses between the processes of a real run are lost, late and repeated."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults.checker import Outcome, check
from tests.faults.history import History
from tests.faults.learning import learning
from tests.faults.points import EVALUATOR, LAUNCHER, TRAINER, environment
from tests.support.runs import Launched

_CALL = "areal_core.api.controller_client:ControllerClient._call"
_CLIENTS = f"{TRAINER}|{EVALUATOR}|{LAUNCHER}"  # of the controller
_END_S = 240.0
_RUN = "r"


def strike(folder: Path, seed: int, *, steps: int = 60) -> Outcome:
    """Run in the new `folder`, to its end, under faults chosen by `seed`."""
    result = Outcome()
    markers, state = folder / "markers", folder / "state"
    markers.mkdir(parents=True)
    config = learning(
        state,
        training={"steps": steps, "checkpoint_every": 5, "keep_checkpoints": 3},
        launch={"restarts": 1000, "stop_timeout_s": 3.0},
    )

    def fault(name: str, process: str, target: str, when: str, action: str, **fields: Any) -> dict[str, Any]:
        values = {"name": name, "process": process, "target": target, "when": when, "action": action, "nth": 1}
        return {"where": "", **values, **fields, "seed": seed, "marker": str(markers / name)}

    faults = [
        fault("request lost", _CLIENTS, "http.client:HTTPConnection.request", "enter", "reset", chance=0.04),
        fault("response lost", _CLIENTS, "http.client:HTTPConnection.getresponse", "exit", "reset", chance=0.04),
        fault("late", _CLIENTS, _CALL, "enter", "delay:0.02", chance=0.1),
        fault("repeated late", TRAINER, _CALL, "exit", "echo", chance=0.2, where="'POST'"),
    ]
    history = History(folder / "history.jsonl", state / "runs" / _RUN / "ledger.sqlite")
    with patch.dict(os.environ, environment(faults, os.environ.get("PYTHONPATH", ""))):
        launched = Launched(config, _RUN)
    with launched as run:
        try:
            status = run.launcher.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = None
        output = run.output()
    result.faults.update({file.name: file.stat().st_size for file in markers.iterdir()})
    if status != 0:
        result.findings.unresumable.append(f"seed {seed}: ended with {status}: {output.strip().splitlines()[-1]}")
    else:
        store = state / "store" / "runs" / _RUN
        result.findings = check(run.run.root, store, history.entries(), steps=steps)
    return result
