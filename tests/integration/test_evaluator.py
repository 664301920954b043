"""Versions are scored beside the training: by the evaluator's own engine or servers, or by those that the run lends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.evaluation.scores import read_records
from areal_core.run.launcher import execute, run_folder
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import Outbox
from areal_core.types import Evaluation
from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.slow


def evaluations(run: RunDir, config: RunConfig) -> list[Evaluation]:
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    with contextlib.closing(ledger):
        return ledger.notes.evaluations()


def scored_run(folder: Path, servers: int) -> tuple[RunDir, RunConfig]:
    """A synchronous run, which is reproducible to the bit."""
    evaluation: dict[str, Any] = {"servers": servers, "samples": 3, "every": 1}
    config = tiny(
        folder,
        mode="sync",
        task={"held_out": 12},
        environment={"verifier": "tests.support.verifiers:ends"},
        training={"steps": 2},
        evaluation=evaluation,
    )
    execute(config, run_id="r", log=print)
    return run_folder(config, "r"), config


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RunConfig]:
    return scored_run(tmp_path_factory.mktemp("own"), servers=1)


@pytest.mark.end_to_end
def test_every_version_has_its_scores_a_table_and_a_page(own_engine: tuple[RunDir, RunConfig]) -> None:
    run, config = own_engine
    scored = evaluations(run, config)
    assert {evaluation.version for evaluation in scored} >= {0, 2}
    with contextlib.closing(Outbox(run.outbox, "r")) as outbox:
        curves = outbox.history()
    for evaluation in scored:
        (file,) = run.evaluations.glob(f"v{evaluation.version:06d}-{evaluation.digest[:8]}.jsonl")
        found = read_records(file)
        assert evaluation.accuracy == sum(record.greedy.correct for record in found) / 12
        right = sum(sample.correct for record in found for sample in record.samples)
        assert evaluation.scores["pass_at_1"] == pytest.approx(right / 36)
        assert 0 < evaluation.scores["pass_at_1"] < 1
        assert evaluation.scores["accuracy_low"] <= evaluation.accuracy <= evaluation.scores["accuracy_high"]
        assert (evaluation.version, evaluation.accuracy) in curves["heldout/accuracy"]
        assert (evaluation.version, evaluation.scores["pass_at_2"]) in curves["heldout/pass_at_2"]
        assert found[0].prompt in file.with_suffix(".html").read_text()


@pytest.mark.recovery
def test_an_evaluator_that_dies_leaves_the_run_its_server(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        training={"steps": 10},
        generation={"servers": 2},
        evaluation={"servers": 0, "every": 2, "samples": 8},
    )
    with Launched(config, "lent") as launched:
        evaluator = launched.pid("evaluator")
        borrowed = launched.run.ready_file("borrowed")
        launched.wait_for("a server is borrowed", borrowed.exists)
        name = orjson.loads(borrowed.read_bytes())["name"]
        os.kill(evaluator, signal.SIGKILL)
        launched.finished()  # with the tokens of both servers in balance
        assert "evaluator-0 was killed by SIGKILL: restart 1 of 2" in launched.output()
        assert not borrowed.exists()
        assert name in ("generation-0", "generation-1")
    assert {evaluation.version for evaluation in evaluations(launched.run, config)} >= {0, 10}
