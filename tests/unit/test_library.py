"""The Python API: its names, and what its functions return."""

from __future__ import annotations

import importlib
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import areal_core as areal
from areal_core import library
from areal_core.errors import ConfigError
from areal_core.run.folders import run_folder
from areal_core.tracking.outbox import Outbox, points
from tests.unit.run.test_progress import SUMMARY


def test_every_name_is_exported_and_imported_at_first_use() -> None:
    assert sorted(areal.__all__) == sorted(areal._API) == sorted(dir(areal))
    assert all(getattr(areal, name) is not None for name in areal.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        importlib.import_module("areal_core").trian  # noqa: B018
    asked = "import sys, areal_core; sys.exit(len({name for name in sys.modules if name.startswith('areal_core.')}))"
    assert subprocess.run([sys.executable, "-c", asked]).returncode == 0


def test_load_takes_values_files_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("training: {steps: 7}")
    for source in (file, str(file), {"training": {"steps": 7}}):
        config = areal.load(source, "seed=3")
        assert (config.training.steps, config.seed) == (7, 3)
    assert areal.load() == areal.RunConfig()
    with pytest.raises(ConfigError, match=r"^training\.stepz: no such field"):
        areal.load({"training": {"stepz": 7}})


def test_compare_trains_arms_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str, int]] = []

    def execute(config: areal.RunConfig, *, run_id: str, **_: Any) -> areal.RunSummary:
        ran.append((run_id, config.mode, config.seed))
        return replace(SUMMARY, run_id=run_id, mode=config.mode)

    monkeypatch.setattr(library, "execute", execute)
    arms = {mode: areal.load(None, f"mode={mode}") for mode in ("sync", "async")}
    found = areal.compare(arms, seeds=[5, 6], name="c", quiet=True)
    assert ran == [
        *(("c.sync.s5", "sync", 5), ("c.async.s5", "async", 5)),
        *(("c.async.s6", "async", 6), ("c.sync.s6", "sync", 6)),
    ]
    assert found[["arm", "seed", "run_id"]].values.tolist()[2] == ["async", 6, "c.async.s6"]
    assert found["effective_tokens_per_s"].notna().all()


def test_results_are_curves_and_scores_by_step(tmp_path: Path) -> None:
    config = areal.load(None, f"state_dir={tmp_path}")
    run = run_folder(config, "first")
    run.root.mkdir(parents=True)
    with closing(Outbox(run.outbox, "first")) as outbox:
        for step in (1, 2, 3):
            outbox.log(points(step, {"reward/mean": step / 4}))
        outbox.log(points(2, {"heldout/accuracy": 0.5, "heldout/wall_s": 1.0}))
    found = areal.results("first", config)
    assert found.summary is None
    assert found.curves["reward/mean"].to_dict() == {1: 0.25, 2: 0.5, 3: 0.75}
    assert found.scores.to_dict("index") == {2: {"accuracy": 0.5, "wall_s": 1.0}}
    with pytest.raises(ConfigError, match=r"^run: there is no run second in "):
        areal.results("second", config)
