from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import _machine
from benchmarks._machine import last_line, machine


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
    monkeypatch.setattr(_machine, "_product_flops_per_s", lambda: 2e10)
    monkeypatch.setattr(_machine, "__file__", str(tmp_path / "benchmarks.py"))
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
