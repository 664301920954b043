"""`make train` with servers of its own: its end by a signal, and by a wrong setting."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from flows.stack import ROOT
from tests.support.control import emulated, environment, processes_of

pytestmark = pytest.mark.slow


@pytest.mark.cpu_seconds(40)
@pytest.mark.recovery
def test_interrupted_train_cancels_its_run_and_ends_everything(tmp_path: Path) -> None:
    train = subprocess.Popen(
        [sys.executable, "-m", "flows.train", "--steps", "10000", *emulated(tmp_path)],
        cwd=ROOT,
        env=environment(tmp_path) | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/unused.db"},  # no server is needed
        stdout=subprocess.PIPE,
        text=True,
    )
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step") and not line.startswith("step 0/"):
            break
    train.send_signal(signal.SIGINT)
    rest, _ = train.communicate(timeout=240)
    assert train.returncode == 130
    assert "The flow run is Cancelled." in rest
    assert processes_of(tmp_path) == {}
    (run,) = map(RunDir, (tmp_path / "runs").iterdir())
    saved, published = checkpoint.newest(Storage.open(run.info().checkpoint_url)), weights.newest(run.weights)
    assert published
    assert saved
    assert saved.step == published.version
