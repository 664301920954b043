"""A run keeps its token."""

from __future__ import annotations

from pathlib import Path

from areal_core.config.schema import load
from areal_core.storage.rundir import RunDir, RunInfo


def test_a_run_keeps_its_token(tmp_path: Path) -> None:
    config = load({"state_dir": str(tmp_path)})
    tokens: list[str] = []
    for run_id in ("r", "r", "other"):
        run = RunDir.create(config, RunInfo(run_id=run_id, model_path="m", checkpoint_url="c"))
        assert run.token_file.stat().st_mode & 0o777 == 0o600
        assert not list(run.root.glob(".token*"))
        tokens.append(run.token())
    assert tokens[0] == tokens[1] != tokens[2]
