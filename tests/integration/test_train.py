"""`make train` itself: its own servers, its result, and its end, also by a signal or a wrong setting."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.stack import ROOT
from tests.support.control import emulated, environment, processes_of, run_python

pytestmark = [pytest.mark.slow, pytest.mark.cpu_seconds(60)]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, whose databases are made once."""
    return tmp_path_factory.mktemp("state")


def _train(state: Path, steps: int, *, tracked: bool) -> Sequence[str]:
    return [sys.executable, "-m", "flows.train", "--steps", str(steps), *emulated(state, tracked=tracked)]


def test_train_brings_its_own_servers_and_ends_them(state: Path) -> None:
    ran = subprocess.run(
        _train(state, 2, tracked=True),
        cwd=ROOT,
        env=environment(state),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 (ended by steps)" in ran.stdout
    assert "make up" in ran.stdout
    assert processes_of(state) == {}


def test_interrupted_train_cancels_its_run_and_ends_everything(state: Path) -> None:
    train = subprocess.Popen(
        _train(state, 10_000, tracked=False),
        cwd=ROOT,
        env=environment(state) | {"MLFLOW_TRACKING_URI": f"sqlite:///{state}/unused.db"},  # no server is started for it
        stdout=subprocess.PIPE,
        text=True,
    )
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step"):
            break
    train.send_signal(signal.SIGINT)
    rest, _ = train.communicate(timeout=120)
    assert train.returncode == 130
    assert "The flow run is Cancelled." in rest
    assert processes_of(state) == {}


def test_wrong_setting_ends_train_before_anything_starts(tmp_path: Path) -> None:
    ran = run_python(tmp_path, "flows.train", "training.stepz=3")
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["areal: error: training.stepz: no such field; did you mean training.steps?"]
    assert list(tmp_path.iterdir()) == []
