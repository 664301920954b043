"""What `make prune` takes and prints."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import StorageError
from areal_core.run.prune import HeldRun, State
from flows import prune_command

DAY_S = 86400.0


def held(run_id: str, days: float, state: State = "finished", leftovers: int = 0) -> HeldRun:
    return HeldRun(
        run_id=run_id,
        folder=Path(run_id),
        storage=None,
        state=state,
        changed=time.time() - days * DAY_S - 60,
        local_bytes=999,
        stored_bytes=1_234_567,
        leftover_bytes=leftovers,
    )


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    done: list[tuple[str, str]] = []
    runs = [
        held("old", 40),
        held(".pruned-x-2", 35, "half deleted"),
        held("left", 31, "stopped", 2_000),
        held("new", 0, "running"),
    ]

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


def test_a_table_of_what_runs_hold(did: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert prune_command.main([]) == 0
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d"
    lines = [re.sub(date, "DATE", " ".join(line.split())) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "run last change state on this machine in the store leftovers",
        "old DATE finished 999 bytes 1.2 MB -",
        ".pruned-x-2 DATE half deleted 999 bytes 1.2 MB -",
        "left DATE stopped 999 bytes 1.2 MB 2.0 kB",
        "new DATE running 999 bytes 1.2 MB -",
        "",
        "To delete: leftovers of 2 runs (1.2 MB), which no resume needs. Runs: RUN=NAME, OLDER=DAYS.",
    ]
    assert did == []


@pytest.mark.parametrize(
    ("chosen", "deleted"),
    [
        ([], [("delete", ".pruned-x-2"), ("free", "left")]),  # leftovers alone
        (["--run", "old", "--run", "left", "--older", "35"], [("delete", "old")]),  # both choices must hold
    ],
)
def test_what_was_chosen_is_deleted(did: list[tuple[str, str]], chosen: list[str], deleted: object) -> None:
    assert prune_command.main([*chosen, "--yes"]) == 0
    assert did == deleted


def test_old_runs_are_deleted_and_failures_named(
    did: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune_command.main(["--older", "30", "--yes"]) == 1
    assert did == [("delete", "old"), ("delete", ".pruned-x-2")]
    told = capsys.readouterr()
    assert "left: not deleted, try again: storage.url: can't delete it: no rights" in told.out
    assert told.err == "areal: error: 1 of 3 could not be deleted\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--run", "new", "--yes"], "RUN: new is running; stop it first"),
        (["--run", "none"], "RUN: there is no run none; `make prune` lists all"),
        (["--older", "30d"], "argument --older: invalid float value: '30d'; see make prune --help"),
        (["storage.uri=x"], "storage.uri: no such field; did you mean storage.url?"),
    ],
)
def test_what_is_wrong_is_one_line(
    did: list[tuple[str, str]], arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prune_command.main(arguments) == 2
    assert capsys.readouterr().err == f"areal: error: {line}\n"
    assert did == []


def test_nothing_is_deleted_without_a_yes(did: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert prune_command.main(["--run", "old"]) == 1
    assert did == []
    monkeypatch.setattr("builtins.input", lambda prompt: "yes")
    assert prune_command.main(["--run", "old"]) == 0
    assert did == [("delete", "old")]
