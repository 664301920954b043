"""Runs whose processes die or hang, whose disk is full, or whose verifier has a bug: they recover, or end in order and
say why."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.slow

ROLES = ("trainer", "controller", "generation")


@pytest.mark.recovery
def test_a_run_recovers_from_the_death_of_each_of_its_processes(tmp_path: Path) -> None:
    config = tiny(tmp_path, training={"steps": 12, "checkpoint_every": 2}, evaluation={"enabled": False})
    with Launched(config, "short") as run:
        for role in ROLES:
            pid = run.pid(role)
            run.until_step(run.step() + 2)
            os.kill(pid, signal.SIGKILL)
            assert run.pid(role, but=pid)
        tokens = run.finished().tokens
        assert tokens.allowance <= 2 * 32 * 24 * len(ROLES)  # of what died: what it was asked for, at most
        for role in ROLES:
            assert run.output().count(f"{role}-0 was killed by SIGKILL: restart 1 of 2") == 1


SIZE_MIB = 24


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of its own file system."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk: needs root, and leave to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(file: Path, *, but_mib: float) -> None:
    """Write into `file` until no more than so much is free."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):  # there is nothing left
        while shutil.disk_usage(file.parent).free >= but_mib * 2**20:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)


ENDS_AT_THE_BOUND = (
    r"state_dir: \S+ has 0\.0[01] GiB left, less than 0\.0078125: the run ends; with more "
    r"room it can be resumed"
)


@pytest.mark.recovery
@pytest.mark.nightly
def test_a_run_on_a_full_disk_ends_in_order_and_goes_on_later(disk: Path) -> None:
    limits = {"disk_min_gib": 8 / 1024, "disk_low_gib": 8 / 1024}
    config = tiny(disk, training={"steps": 60, "checkpoint_every": 3}, evaluation={"enabled": False}, launch=limits)
    with Launched(config, "full") as run:
        run.until_step(4)
        fill(disk / "filler", but_mib=4)
        assert run.end() == 2
        assert not run.run.summary.exists()
        assert re.fullmatch(f"areal: error: {ENDS_AT_THE_BOUND}", run.output().rstrip().splitlines()[-1])
        assert "Traceback" not in run.output()
    (disk / "filler").unlink()
    with Launched(config, "full") as run:
        run.finished()


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
