"""New runs, and resumed ones that `prepare` adopts."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.controller.service import Service
from areal_core.errors import ConfigError
from areal_core.run import preflight
from areal_core.run.prepare import prepare
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.tracking import mlflow_client
from areal_core.tracking.outbox import Outbox
from tests.support.runs import changed


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier is not tried, which takes a process each time; test_preflight.py has it tried."""
    monkeypatch.setattr(preflight, "_try_verifier", lambda *_: None)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What opens the run in MLflow, where a server answers."""
    start_run = MagicMock(return_value="tracked")
    monkeypatch.setattr(mlflow_client, "start_run", start_run)
    monkeypatch.setattr(mlflow_client, "experiment_of", lambda uri, run_id: f"of {run_id}")
    monkeypatch.setattr(mlflow_client, "check_reachable", lambda uri: None)
    return start_run


def test_tracking_run_is_opened_once_and_kept(
    base: dict[str, Any], mlflow: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run needs no tracking server."""
    config = changed(base, tracking={"enabled": True, "uri": "http://tracker"})
    for flow in ("f1", "f2"):
        info = prepare(config, run_id="r", flow_run_id=flow, tags={"arm": "a"}, log=print).info()
        assert (info.tracking_run_id, info.tracking_experiment_id, info.flow_run_id) == ("tracked", "of tracked", flow)
        monkeypatch.setattr(mlflow_client, "check_reachable", pytest.fail)
    mlflow.assert_called_once()
    uri, experiment, name, tags, params, inputs = mlflow.call_args.args
    assert (uri, experiment, name) == ("http://tracker", "areal", "r")
    assert params["rollout"]["batch_size"] == 512
    assert " learns arithmetic: 25 steps of 512 completions" in tags["mlflow.note.content"]
    assert [one["context"] for one in inputs] == ["training", "evaluation"]
    known = {"areal.run_id": "r", "areal.flow_run_id": "f1", "mode": "async", "eta": "2", "seed": "1", "arm": "a"}
    assert tags.items() >= (known | {"objective": "decoupled"}).items()
    assert tags["version.torch"].startswith("2.")


def test_a_resumed_run_may_change_its_end_and_its_launch(base: dict[str, Any]) -> None:
    first = prepare(load(base), run_id="r", log=print)
    outbox = Outbox(first.outbox, "r")
    outbox.end("FAILED")
    training = {"steps": 50, "engine": "deepspeed", "zero_stage": 3, "ranks": 2}
    later = changed(base, training=training, stop={"score": 0.9}, launch={"restarts": 7})
    run = prepare(later, run_id="r", log=print)
    assert run == first
    assert run.config() == later
    assert outbox.ended() is None
    outbox.close()


@pytest.mark.parametrize(
    ("settings", "resumes"),
    [
        ({}, False),
        ({"training": {"steps": 10}, "launch": {"restarts": 7}}, False),  # it had enough before its 25 steps
        ({"stop": {"score": 0.9}}, True),
    ],
)
def test_only_a_finished_run_with_another_end_goes_on(
    base: dict[str, Any], settings: dict[str, Any], resumes: bool
) -> None:
    run = prepare(load(base), run_id="r", log=print)
    run.summary.write_text('{"steps": 10}')
    written = (run.root / "run.json").stat().st_mtime_ns
    with closing(Outbox(run.outbox, "r")) as outbox:
        outbox.end("FINISHED")
        assert prepare(changed(base, **settings), run_id="r", log=print) == run
        assert (outbox.ended() is None) == run.superseded.exists() == (not run.summary.exists()) == resumes
    assert ((run.root / "run.json").stat().st_mtime_ns != written) == (run.config() != load(base)) == resumes


ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "note": "a"} for i in range(4)]


def put_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def of_rows(base: dict[str, Any], tmp_path: Path) -> RunConfig:
    put_rows(tmp_path, "path", ROWS)
    put_rows(tmp_path, "held_out_path", [{"question": "9+9=", "answer": "18"}, {"question": "8+8=", "answer": "16"}])
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("path", "held_out_path")}
    return changed(base, task={"name": "rows", **paths})


@pytest.mark.parametrize(
    ("file", "rows", "machine"),
    [
        ("path", ROWS[::-1], "same"),
        ("path", [*ROWS[:3], {"question": "3+3=", "answer": "7"}], "another"),
        ("held_out_path", [{"question": "9+9=", "answer": "18"}], "another"),
    ],
)
def test_a_resumed_run_refuses_other_rows(
    of_rows: RunConfig, tmp_path: Path, machine: str, file: str, rows: list[dict[str, Any]]
) -> None:
    run = prepare(of_rows, run_id="r", log=print)
    if machine == "another":
        extra = {"config": of_rows.to_dict(), checkpoint.PROMPTS: run.info().prompts, checkpoint.BASE: None}
        checkpoint.save(Storage.open(run.info().checkpoint_url), 1, {}, extra)
        shutil.rmtree(run.root)
    put_rows(tmp_path, file, rows)
    said = rf"^task\.{file}: yields different prompts than when this run was started; restore the task's files"
    with pytest.raises(ConfigError, match=said):
        prepare(of_rows, run_id="r", log=print)


def test_a_resumed_mixture_keeps_its_tasks(of_rows: RunConfig, tmp_path: Path) -> None:
    values = merge(of_rows.to_dict(), "tasks.words.task", of_rows.to_dict()["task"])
    run = prepare(load(values), run_id="r", log=print)
    assert run.info().prompts.keys() == {"tasks.words.task.path", "tasks.words.task.held_out_path"}
    prepare(load(merge(values, "tasks.words.environment.max_no_result", 0.5)), run_id="r", log=print)
    for name, before in (("tasks.words.ratio", 1), ("tasks.more.ratio", None)):
        with pytest.raises(ConfigError, match=rf"^{name}: must be {before} as when this run was started, got 2;"):
            prepare(load(merge(values, name, 2)), run_id="r", log=print)
    put_rows(tmp_path, "path", ROWS[::-1])
    with pytest.raises(ConfigError, match=r"^tasks\.words\.task\.path: yields different prompts"):
        prepare(load(values), run_id="r", log=print)


async def test_same_prompts_are_taken_and_a_controller_that_starts_again_refuses_others(
    of_rows: RunConfig, tmp_path: Path
) -> None:
    run = prepare(of_rows, run_id="r", log=print)
    assert run.info().prompts.keys() == {"task.path", "task.held_out_path"}
    put_rows(tmp_path, "path", [dict(reversed(row.items())) for row in ROWS])
    assert prepare(of_rows, run_id="r", log=print).info().prompts == run.info().prompts
    Service(run)
    with closing(Outbox(run.outbox, "r")) as outbox:
        report = outbox.pending_document()
    assert report is not None
    assert report.data["training"]["rows"] == len(ROWS)
    for others in (ROWS[::-1], [row | {"note": "for a verifier"} for row in ROWS]):
        put_rows(tmp_path, "path", others)
        with pytest.raises(ConfigError, match=r"^task\.path: yields different prompts"):
            Service(run)
