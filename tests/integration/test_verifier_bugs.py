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
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of a module, less its name."""
    (tmp_path / "own_verifiers.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    return "own_verifiers"


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("first_call", 5, "KeyError: 'anwser'"),
        pytest.param(
            *("completions", None, "ValueError: a verifier returns a score from 0 to 1, or a Verdict; got 2.0"),
            marks=pytest.mark.end_to_end,
        ),
        pytest.param(
            *("hangs", 12, "no verdict within 1 s (rollout.reward_timeout_s)"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_bug_ends_the_run_without_a_restart(
    tmp_path: Path, verifiers: str, name: str, line: int | None, said: str
) -> None:
    config = tiny(tmp_path, environment={"verifier": f"{verifiers}:{name}"}, rollout={"reward_timeout_s": 1.0})
    with Launched(config, name) as run:
        assert run.end() == 1
        output = run.output()
        at = "" if line is None else f" ({tmp_path}/own_verifiers.py:{line})"
        first = f"environment.verifier {verifiers}:{name}: {said}{at}"
        end = next(each for each in output.splitlines() if each.startswith("areal: error: "))
        assert end.startswith(f"areal: error: {first}")
        assert "restart" not in output
        assert not run.run.summary.exists()
    for shown in ("prompt:", "completion:"):
        assert f"    {shown}\n" in output
    if line is not None:
        assert f'File "{tmp_path}/own_verifiers.py", line {line}, in {name}' in output
    if name == "first_call":
        assert not run.run.logs.exists()  # no process of the run was started
