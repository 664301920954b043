"""The best version of a run: which it is, and the model folder that it becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from areal_core.config.schema import load
from areal_core.controller.export import best_of, export, model_card
from areal_core.errors import StorageError
from areal_core.models.adapters import merged
from areal_core.models.spec import read_arrays, read_spec
from areal_core.storage import weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.types import TokenLedger
from tests.support.lora import LORA, adapter, form
from tests.support.models import write_tiny
from tests.support.records import evaluation


def run_in(folder: Path, model_path: str = "", **groups: Any) -> RunDir:
    info = RunInfo(run_id="r", model_path=model_path, checkpoint_url="")
    return RunDir.create(load({"state_dir": str(folder), **groups}), info)


def test_of_several_with_the_highest_accuracy_the_first_is_the_best() -> None:
    assert best_of([]) is None
    best = best_of([evaluation(0, 0.25), evaluation(5, 0.75), evaluation(10, 0.75), evaluation(15, 0.5)])
    assert best is not None
    assert best.version == 5


def test_it_becomes_a_model_folder_beside_the_final_one(tmp_path: Path) -> None:
    final = write_tiny(tmp_path / "store" / "final")
    spec = read_spec(final)
    (final / "README.md").write_text("the final one")
    changed = {name: array + 1 for name, array in read_arrays(final, spec).items()}
    version = weights.publish(tmp_path / "weights", 5, changed)
    url = export(run_in(tmp_path), Storage.open(str(tmp_path / "store")), version, "the best one")
    best = Path(url)
    assert best == tmp_path / "store" / "best"
    assert {file.name for file in best.iterdir()} == {file.name for file in final.iterdir()}
    assert json.loads((best / "config.json").read_text()) == json.loads((final / "config.json").read_text())
    assert (best / "README.md").read_text() == "the best one"
    found = read_arrays(best, spec)
    assert all((found[name] == array).all() for name, array in changed.items())


def test_adapter_is_merged_into_the_base_model(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    spec = read_spec(base)
    write_tiny(tmp_path / "store" / "final")
    mine = adapter(spec)
    version = weights.publish(tmp_path / "weights", 5, mine, lora=form())
    run = run_in(tmp_path, str(base), training={"lora": {"rank": LORA.rank, "alpha": LORA.alpha}})
    found = read_arrays(export(run, Storage.open(str(tmp_path / "store")), version, "the best one"), spec)
    whole = merged(read_arrays(base, spec), mine, form())
    assert all((found[name] == array).all() for name, array in whole.items())


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_version_that_is_not_what_was_scored_becomes_none(tmp_path: Path, damage: str) -> None:
    final = write_tiny(tmp_path / "store" / "final")
    version = weights.publish(tmp_path / "weights", 6, read_arrays(final, read_spec(final)))
    if damage == "gone":
        weights.release(tmp_path / "weights", [6])
    else:
        file = Path(version.path) / "model.safetensors"
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StorageError, match=r"v000006: version 6 is missing or damaged"):
        export(run_in(tmp_path), Storage.open(str(tmp_path / "store")), version, "")
    assert not (tmp_path / "store" / "best").exists()


def test_card_has_the_head_of_the_hub_and_tells_what_was_trained_and_scored():
    tokens = TokenLedger(generated=12345, consumed=12345, dropped=0, buffered=0, in_flight=0)
    summary = MagicMock(accuracy_before=0.25, accuracy_after=0.5, steps=20, seed=3, tokens=tokens)
    card = model_card(load({"model": {"path": "hub:someone/small"}}), summary, evaluation(5, 0.75))
    assert "Trained from hub:someone/small" in card
    assert "20 steps of 512 completions of `arithmetic`, seed 3, 12,345 tokens" in card
    assert "0.250 before the training, 0.500 after it. This is version 5, its best one: 0.750." in card
    assert yaml.safe_load(card.split("---\n", 2)[1])["library_name"] == "transformers"
    summary.accuracy_before = summary.accuracy_after = None
    assert "No version was evaluated." in model_card(load({}), summary)
