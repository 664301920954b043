from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal_core.errors import ConfigError
from benchmarks import _harness
from benchmarks._harness import in_turns, last_line, machine, numbers, positive, report, some_of


def test_the_last_line_says_what_it_was_measured_on() -> None:
    threads = torch.get_num_threads()
    line = last_line({"tokens_per_s": 7})
    assert "\n" not in line
    told = json.loads(line)
    assert told["tokens_per_s"] == 7
    assert told["machine"].keys() == {"revision", "cpu", "cores", "gflops_per_core"}
    assert told["machine"]["cpu"]
    assert told["machine"]["gflops_per_core"] > 0.1
    assert torch.get_num_threads() == threads


def test_the_revision_is_that_of_these_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_harness, "_product_flops_per_s", lambda: 2e10)
    monkeypatch.setattr(_harness, "__file__", str(tmp_path / "benchmarks.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine()["revision"] is None  # sources that git knows nothing of

    def git(*command: str) -> str:
        named = ("-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path))
        return subprocess.run(["git", *named, *command], capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "file").write_text("one")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    assert machine() == machine() | {"revision": git("rev-parse", "--short", "HEAD"), "gflops_per_core": 20.0}
    (tmp_path / "file").write_text("two")
    assert machine()["revision"] == git("rev-parse", "--short", "HEAD") + "+"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (numbers, "1,1", "distinct whole numbers"),
        (numbers, "-1,2", "distinct whole numbers"),
        (positive, "0", "at least 1, got 0"),
        (some_of(["a", "b"]), "a,c", "some of a,b, got a,c"),
    ],
)
def test_arguments_that_can_not_be_are_refused(kind: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        kind(text)
    assert (numbers("0,4"), positive("3"), some_of(["a", "b"])("b,a")) == ([0, 4], 3, ["b", "a"])


def test_every_arm_goes_first_in_turn() -> None:
    assert [in_turns(["a", "b", "c"], turn) for turn in (0, 1, 3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["a", "b", "c"],
    ]


def test_what_a_user_did_wrong_ends_in_one_line() -> None:
    def measure() -> dict[str, int]:
        raise ConfigError("seed: no")

    with pytest.raises(SystemExit, match=r"^areal: error: seed: no$"):
        report(measure)
