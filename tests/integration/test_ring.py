"""The whole ring on one machine: every role a process of its own, a tiny model, two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_core.config import RunConfig, load
from areal_core.run import execute, run_folder
from areal_core.types import RunStatus

pytestmark = pytest.mark.slow


def tiny(root: Path, **fields: Any) -> RunConfig:
    return load(
        {
            "state_dir": str(root / "state"),
            "storage": {"url": str(root / "store")},
            "tracking": {"enabled": False},
            "model": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 32},
            "warmup": {"worked_steps": 20, "direct_steps": 5},
            "task": {"held_out": 16},
            "algorithm": {"group_size": 4},
            "rollout": {"batch_size": 16},
            "training": {"steps": 2, "minibatches": 2},
            "launch": {"restarts": 0},
            **fields,
        }
    )


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_from_nothing_to_its_summary(tmp_path: Path, mode: str) -> None:
    config = tiny(tmp_path, mode=mode)
    lines: list[str] = []
    seen: list[RunStatus] = []
    summary = execute(config, run_id="r", log=lines.append, on_status=seen.append)
    assert (summary.run_id, summary.reason, summary.steps) == ("r", "steps", 2)
    assert summary.tokens.balanced
    assert summary.tokens.consumed > 0
    assert Path(summary.model_url, "model.safetensors").exists()
    assert mode == "async" or summary.staleness_max == 0
    assert seen
    ready = run_folder(config, "r").ready.glob("[!.]*.json")
    assert not any(Path(f"/proc/{json.loads(file.read_text())['pid']}").exists() for file in ready)
    assert execute(config, run_id="r", log=lines.append) == summary  # a finished run is not run again
