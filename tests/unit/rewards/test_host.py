"""Reward workers on another machine, as a process; what they do with work, tests/integration has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from areal_core.config.schema import load
from areal_core.errors import ArealError, ConfigError, GenerationError, RewardWorkerError
from areal_core.launch.process import SPENT
from areal_core.models.tokenizer import char_tokenizer
from areal_core.rewards.host import Host
from areal_core.rewards.remote import decode_outcome, encode_work
from areal_core.rewards.worker import Arrived, WorkerProcess
from areal_core.storage.rundir import RunDir, RunInfo


def run_dir(folder: Path, **config: object) -> RunDir:
    (folder / "model").mkdir()
    char_tokenizer().save(folder / "model" / "tokenizer.json")
    info = RunInfo(run_id="r", model_path=str(folder / "model"), checkpoint_url="/store")
    return RunDir.create(load({"state_dir": str(folder), **config}), info)


class Failing:
    """In the place of a worker."""

    def __init__(self, error: ArealError, *, dies: bool = False) -> None:
        self.forgotten: list[int] = []
        self._error = error
        self._dies = dies

    def ask(self, message: Arrived, timeout_s: float) -> ArealError:
        if self._dies:
            raise self._error
        return self._error


def test_errors_of_groups_are_told_and_others_are_this_machines(tmp_path: Path) -> None:
    arrived = Arrived(group=5, prompt=None, completions=[])
    host = Host(run_dir(tmp_path), 1, 1)

    def answer(error: ArealError, *, dies: bool = False) -> type:
        worker = Failing(error, dies=dies)
        told, lost = host._answer(cast(WorkerProcess, worker), encode_work([4], arrived))
        assert (worker.forgotten, lost) == ([4], dies)
        return type(decode_outcome(told))

    assert answer(GenerationError("no body")) is GenerationError
    assert answer(RewardWorkerError("it died"), dies=True) is RewardWorkerError
    with pytest.raises(ConfigError, match="no sandbox"):
        answer(ConfigError("no sandbox here any more"))


def test_a_machine_that_lacks_the_environment_says_so_and_takes_no_work(tmp_path: Path) -> None:
    """It is not started again: it would lack it again."""
    run = run_dir(tmp_path, environment={"name": "elsewhere_alone:Environment"})
    argv = [sys.executable, "-m", "areal_core.rewards.host", "--run-dir", run.root, "--first", "1", "--workers", "2"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == SPENT
    [line] = ended.stderr.splitlines()
    assert line.startswith("areal: error: environment.name: ")
    assert "elsewhere_alone" in line
    assert run.ready_info("rewards", 1) is None
