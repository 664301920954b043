"""Reward workers on another machine, as a process; what they do with work, tests/integration has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal_core.config.schema import load
from areal_core.launch.process import SPENT
from areal_core.models.tokenizer import char_tokenizer
from areal_core.storage.rundir import RunDir, RunInfo


def test_a_machine_that_lacks_the_environment_says_so_and_takes_no_work(tmp_path: Path) -> None:
    """It is not started again: it would lack it again."""
    (tmp_path / "model").mkdir()
    char_tokenizer().save(tmp_path / "model" / "tokenizer.json")
    config = load({"state_dir": str(tmp_path), "environment": {"name": "elsewhere_alone:Environment"}})
    run = RunDir.create(config, RunInfo(run_id="r", model_path=str(tmp_path / "model"), checkpoint_url="/store"))
    argv = [sys.executable, "-m", "areal_core.rewards.host", "--run-dir", run.root, "--first", "1", "--workers", "2"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == SPENT
    [line] = ended.stderr.splitlines()
    assert line.startswith("areal: error: environment.name: ")
    assert "elsewhere_alone" in line
    assert run.ready_info("rewards", 1) is None
