"""A run whose verifier has a bug: it ends soon, once, and shows the bug with its place, a prompt and a completion."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.runs import Launched, tiny

VERIFIERS = """
import time, zlib

def first_call(task, completion):
    return float({}["anwser"])

def completions(task, completion):
    return 2.0 if completion != task.answer else 1.0

def hangs(task, completion):
    while completion != task.answer:
        time.sleep(1)
    return 1.0

def now_and_then(task, completion):
    if zlib.crc32((task.text + completion).encode()) % 50 == 0:
        raise KeyError(completion)
    return 0.5 * completion.endswith(task.answer)
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of a module, less its name."""
    (tmp_path / "own_verifiers.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    return "own_verifiers"


@pytest.mark.parametrize(
    ("name", "line", "said", "why"),
    [
        ("first_call", 5, "KeyError: 'anwser'", ""),
        pytest.param(
            *("completions", None, "ValueError: a verifier returns a score from 0 to 1, or a Verdict; got 2.0"),
            "no result",
            marks=pytest.mark.end_to_end,
        ),
        pytest.param(
            *("hangs", 12, "no verdict within 1 s (rollout.reward_timeout_s)", "3 tries in a row"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_bug_ends_the_run_without_a_restart(
    tmp_path: Path, verifiers: str, name: str, line: int | None, said: str, why: str
) -> None:
    config = tiny(tmp_path, environment={"verifier": f"{verifiers}:{name}"}, rollout={"reward_timeout_s": 1.0})
    with Launched(config, name) as run:
        assert run.end() == 1
        output = run.output()
        at = "" if line is None else f" ({tmp_path}/own_verifiers.py:{line})"
        first = f"environment.verifier {verifiers}:{name}: {said}{at}"
        end = next(each for each in output.splitlines() if each.startswith("areal: error: "))
        assert end.startswith(f"areal: error: {first}")
        assert why in end
        assert "restart" not in output
        assert not run.run.summary.exists()
    for shown in ("prompt:", "completion:"):
        assert f"    {shown}\n" in output
    if line is not None:
        assert f'File "{tmp_path}/own_verifiers.py", line {line}, in {name}' in output
    if not why:
        assert not run.run.logs.exists()  # no process of the run was started


@pytest.mark.nightly
def test_verifier_that_fails_now_and_then_costs_its_rollouts_alone(tmp_path: Path, verifiers: str) -> None:
    """And one that gives no full score has groups that can be learnt from."""
    config = tiny(tmp_path, environment={"verifier": f"{verifiers}:now_and_then"}, training={"steps": 8})
    with Launched(config, "r") as run:
        run.finished()
        output = run.output()
    for who in ("controller-0", "evaluator-0"):
        shown = f"{who}: areal: error: environment.verifier {verifiers}:now_and_then: KeyError"
        assert output.count(shown) <= 1, output
    assert "now_and_then: KeyError" in output
