"""Evaluations with real servers: by a command, killed and resumed; and of a run's versions beside the training."""

import contextlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import orjson
import psutil
import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.errors import ConfigError, ModelError
from areal_core.evaluation.scores import read_records
from areal_core.run.evaluation import evaluate
from areal_core.run.launcher import execute, run_folder
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import Outbox
from areal_core.types import Evaluation
from tests.support.models import write_tiny
from tests.support.processes import wait_for
from tests.support.runs import Launched, tiny

spawn = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    write_tiny(folder / "model")
    return folder


def config(state: Path, **task):
    return load(
        {
            "mode": "sync",
            "state_dir": str(state),
            "storage": {"url": str(state / "storage")},
            "tracking": {"enabled": False},
            "model": {"path": str(state / "model")},
            "task": {"held_out": 48, "max_new_tokens": 12, **task},
            "environment": {"verifier": "tests.support.verifiers:slow"},
            "evaluation": {"samples": 4},
            "generation": {"slots": 8},
        }
    )


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


def _evaluate(state: Path, name: str) -> None:
    evaluate({"chains": config(state)}, name=name)


@pytest.mark.recovery
def test_killed_and_asked_for_again_it_comes_to_the_same(state):
    file = state / "evaluations" / "killed" / "chains.jsonl"
    process = spawn.Process(target=_evaluate, args=(state, "killed"))
    process.start()
    wait_for(lambda: lines(file) >= 6)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    part = lines(file)
    assert part < 48
    done: list[int] = []
    [again] = evaluate({"chains": config(state)}, name="killed", on_progress=lambda _, n, of: done.append(n))
    assert done[0] == part  # what was recorded is not done again
    [whole] = evaluate({"chains": config(state)}, name="whole")
    assert again.records == whole.records
    assert again.scores == whole.scores
    assert len(whole.records) == 48
    assert json.loads(whole.records_file.with_suffix(".scores.json").read_text())["problems"] == 48
    assert whole.page.exists()
    ready = (state / "evaluations").glob("*/ready/[!.]*.json")
    assert not any(psutil.pid_exists(json.loads(each.read_text())["pid"]) for each in ready)


def test_what_is_wrong_is_one_line(state, tmp_path):
    evaluate({"chains": config(state)}, name="other")
    with pytest.raises(ConfigError, match=r"^task\.max_new_tokens: must be 12 as in the records of .*other.*, got 11"):
        evaluate({"chains": config(state, max_new_tokens=11)}, name="other")
    with pytest.raises(ConfigError, match=r"^reference: must be an earlier evaluation of chains, got 'nothing'"):
        evaluate({"chains": config(state)}, reference="nothing")
    with pytest.raises(ConfigError, match=r"^name: must be letters"):
        evaluate({"chains": config(state)}, name="../x")
    with pytest.raises(ConfigError, match=r"^benchmarks: must be letters"):
        evaluate({"../x": config(state)})
    with pytest.raises(ModelError, match=r"^model\.path: .*is not a model folder"):
        evaluate({"chains": load({**config(state).to_dict(), "model": {"path": str(tmp_path)}})})


def evaluations(run: RunDir, config: RunConfig) -> list[Evaluation]:
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    with contextlib.closing(ledger):
        return ledger.notes.evaluations()


@pytest.mark.slow
def test_every_version_has_its_scores_a_table_and_a_page(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        mode="sync",
        task={"held_out": 12},
        environment={"verifier": "tests.support.verifiers:ends"},
        training={"steps": 2},
        evaluation={"servers": 1, "samples": 3, "every": 1},
    )
    execute(config, run_id="r", log=print)
    run = run_folder(config, "r")
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
