"""What `make prune` takes and prints."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import StorageError
from areal_core.run.command import run_command
from areal_core.run.prune import HeldRun, State
from flows import prune_command

_TABLE = """\
run last change state on this machine in the store leftovers
old DATE finished 999 bytes 1.2 MB -
.pruned-x-2 DATE half deleted 999 bytes 1.2 MB -
left DATE stopped 999 bytes 1.2 MB 2.0 kB
new DATE running 999 bytes 1.2 MB -

To delete: leftovers of 2 runs (1.2 MB), which no resume needs. Runs: RUN=NAME, OLDER=DAYS."""


def held(run_id: str, days: float, state: State = "finished", leftovers: int = 0) -> HeldRun:
    changed = time.time() - days * 86400.0 - 60
    sizes = {"local_bytes": 999, "stored_bytes": 1_234_567, "leftover_bytes": leftovers}
    return HeldRun(run_id=run_id, folder=Path(run_id), storage=None, state=state, changed=changed, **sizes)


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    done: list[tuple[str, str]] = []
    left, half = held("left", 31, "stopped", 2_000), held(".pruned-x-2", 35, "half deleted")
    runs = [held("old", 40), half, left, held("new", 0, "running")]

    def act(what: str) -> Any:
        def action(run: HeldRun, *_: object) -> None:
            if run.run_id == "left" and what == "delete":
                raise StorageError("storage.url: can't delete it: no rights")
            done.append((what, run.run_id))

        return action

    monkeypatch.setattr(prune_command, "held_runs", lambda config, log: runs)
    monkeypatch.setattr(prune_command, "delete", act("delete"))
    monkeypatch.setattr(prune_command, "free_leftovers", act("free"))
    return done


def test_what_runs_hold_is_shown(did: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: prune_command.main([])) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", "\n".join(lines)) == _TABLE
    assert did == []


@pytest.mark.parametrize(
    ("chosen", "status", "deleted", "line"),
    [
        ([], 0, [("delete", ".pruned-x-2"), ("free", "left")], ""),  # leftovers alone
        (["--run", "old", "--run", "left", "--older", "35"], 0, [("delete", "old")], ""),  # both choices must hold
        (["--older", "30"], 1, [("delete", "old"), ("delete", ".pruned-x-2")], "1 of 3 could not be deleted"),
        (["--run", "new"], 2, [], "RUN: new is running; stop it first"),
        (["--run", "none"], 2, [], "RUN: there is no run none; `make prune` lists all"),
        (["--older", "30d"], 2, [], "argument --older: invalid float value: '30d'; see make prune --help"),
        (["storage.uri=x"], 2, [], "storage.uri: no such field; did you mean storage.url?"),
    ],
)
def test_what_was_chosen_is_deleted(
    did: list[tuple[str, str]],
    chosen: list[str],
    status: int,
    deleted: list[tuple[str, str]],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(lambda: prune_command.main([*chosen, "--yes"])) == status
    assert did == deleted
    told = capsys.readouterr()
    assert told.err == (f"areal: error: {line}\n" if line else "")
    assert ("left: not deleted, try again: storage.url: can't delete it: no rights" in told.out) == (status == 1)


def test_nothing_is_deleted_without_a_yes(did: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, status, deleted in (("y", 1, []), ("yes", 0, [("delete", "old")])):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert run_command(lambda: prune_command.main(["--run", "old"])) == status
        assert did == deleted
