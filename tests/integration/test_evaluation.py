"""An evaluation with real servers: killed and asked for again it comes to the same; what is wrong is one line."""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from areal_core.config.schema import TaskConfig, load
from areal_core.environments.row_source import LeftOut, SuccessRates
from areal_core.errors import ConfigError, ModelError, ProcessError
from areal_core.run.evaluation import evaluate
from tests.support.models import write_tiny

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
    deadline = time.monotonic() + 240
    while lines(file) < 6:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
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
    path = str(whole.records_file.with_suffix(".rates.jsonl"))
    solved = SuccessRates(TaskConfig(success_path=path, min_success=0.01))
    for record in whole.records:  # of training prompts, those that are never solved would be left out
        with contextlib.nullcontext() if any(one.correct for one in record.samples) else pytest.raises(LeftOut):
            solved.check({}, [record.prompt_id])
    ready = (state / "evaluations").glob("*/ready/[!.]*.json")
    assert not any(psutil.pid_exists(json.loads(each.read_text())["pid"]) for each in ready)


def test_what_is_wrong_is_one_line(state, tmp_path):
    evaluate({"chains": config(state)}, name="other")
    with pytest.raises(ConfigError, match=r"^task\.max_new_tokens: .*other.* holds records with 12, got 11"):
        evaluate({"chains": config(state, max_new_tokens=11)}, name="other")
    with pytest.raises(ConfigError, match=r"^reference: nothing has no records of chains"):
        evaluate({"chains": config(state)}, reference="nothing")
    with pytest.raises(ConfigError, match=r"^name: must be letters"):
        evaluate({"chains": config(state)}, name="../x")
    with pytest.raises(ConfigError, match=r"^reference: must have at most 160 bytes, got 300"):
        evaluate({"chains": config(state)}, reference="x" * 300)
    with pytest.raises(ConfigError, match=r"^benchmarks: must be letters"):
        evaluate({"../x": config(state)})
    with pytest.raises(ConfigError, match=r"^benchmarks: must name one"):
        evaluate({})
    with pytest.raises(ModelError, match=r"^model\.path: .*no model folder"):
        evaluate({"chains": load({**config(state).to_dict(), "model": {"path": str(tmp_path)}})})


def test_servers_that_cannot_start_end_it(state):
    broken = {**config(state).to_dict(), "generation": {"engine": "tests.support.nothing:engine"}}
    broken["launch"] = {"restarts": 0}
    with pytest.raises((ProcessError, ConfigError), match=r"generation"):
        evaluate({"chains": load(broken)}, name="broken")
