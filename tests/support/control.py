"""Commands of the control plane run with a state folder of their own and a model that takes no time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from flows.compose import configure
from flows.places import FILES
from tests.support.models import put_base_model
from tests.support.processes import TIMEOUT_S, command_line, entries

_NAMED_BY_THE_ENVIRONMENT = ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI")
_SMALL = (
    *("model.hidden_size=16", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.intermediate_size=32"),
    *("warmup.worked_steps=1", "warmup.worked_batch=1", "warmup.direct_steps=0", "task.held_out=16"),
    *("algorithm.group_size=4", "rollout.batch_size=16", "training.minibatches=2", "launch.restarts=0"),
    "health.max_idle_steps=null",  # they learn nothing, for which an automation pauses their deployment
)
_EMULATED = ("generation.engine=emulated", "training.engine=emulated", "emulation.speed=200")


def environment(state: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NAMED_BY_THE_ENVIRONMENT}
    return kept | {"AREAL_STATE_DIR": str(state), "PREFECT_WORKER_QUERY_SECONDS": "1"}


def tiny(state: Path) -> list[str]:
    """Overrides of a run that takes seconds; its base model is there."""
    overrides = [*_SMALL, f"state_dir={state}", f"storage.url={state}/storage"]
    put_base_model(configure(overrides=overrides))
    return overrides


def emulated(state: Path, *, tracked: bool = False) -> list[str]:
    """The same without engines, which import torch, and without MLflow: for what does not depend on what is learnt."""
    return [*tiny(state), *_EMULATED, f"tracking.enabled={tracked}"]


def run_python(state: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`settings` are variables of the environment."""
    command, settings = [sys.executable, "-m", *arguments], environment(state) | settings
    return subprocess.run(command, cwd=FILES, env=settings, capture_output=True, text=True, timeout=TIMEOUT_S)


def processes_of(state: Path) -> dict[int, str]:
    """Pid and command line of every process that has this state folder in its environment or its command line."""
    found: dict[int, str] = {}
    for process in entries():
        with suppress(OSError):  # gone meanwhile
            command = command_line(int(process.name))
            if str(state).encode() in (process / "environ").read_bytes() + command.encode():
                found[int(process.name)] = command.strip()
    return found
