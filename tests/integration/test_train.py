"""`make train` itself: its own servers, its result, its end, whatever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.stack import ROOT
from tests.support.control import environment, processes_of, run_python, tiny

pytestmark = pytest.mark.slow


def _train(state: Path, *arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "flows.train", *arguments, *tiny(state)]


def test_train_brings_its_own_servers_and_ends_them(tmp_path: Path) -> None:
    ran = subprocess.run(
        _train(tmp_path, "--steps", "2"),
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 (ended by steps)" in ran.stdout
    assert "make up" in ran.stdout
    assert processes_of(tmp_path) == {}


def test_interrupted_train_cancels_its_run_and_ends_everything(tmp_path: Path) -> None:
    train = subprocess.Popen(
        _train(tmp_path, "--steps", "10000"), cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step"):
            break
    train.send_signal(signal.SIGINT)
    rest, _ = train.communicate(timeout=120)
    assert train.returncode == 130
    assert "The flow run is Cancelled." in rest
    assert processes_of(tmp_path) == {}


def test_wrong_setting_ends_train_before_anything_starts(tmp_path: Path) -> None:
    ran = run_python(tmp_path, "flows.train", "training.stepz=3")
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["areal: error: training.stepz: no such field; did you mean training.steps?"]
    assert list(tmp_path.iterdir()) == []
