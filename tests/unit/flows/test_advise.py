"""What a run advises, as a command and at the start of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows import advise, train, watch
from tests.support.splits import recorded_run


def test_every_split_is_shown_the_best_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run(tmp_path / ".areal", 2, 6)
    monkeypatch.chdir(tmp_path)
    advise.main(["first"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "generation.servers=" in line]
    assert len(rows) == 7
    cells = [cell for cell in rows[0] if cell != "│"]
    assert cells == ["4", "4", "1.60", "generation.servers=4", "training.ranks=4"]


def test_another_run_starts_with_the_split_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After what else is set, so that it holds; and only if it is asked for."""
    recorded_run(tmp_path / ".areal", 2, 6)
    monkeypatch.chdir(tmp_path)
    started: list[dict[str, Any]] = []

    def run_command(_name: str, _deployment: str, parameters: Any) -> int:
        started.append(parameters())
        return 0

    monkeypatch.setattr(watch, "run_command", run_command)
    command = ["train", "--experiment", "emulated-1.5b", "launch.devices=8", "training.ranks=6"]
    for arguments in (command, [*command, "--split", "first"]):
        monkeypatch.setattr("sys.argv", arguments)
        assert train.main() == 0
    assert started[0]["overrides"] == ["launch.devices=8", "training.ranks=6"]
    assert started[1]["overrides"] == [*started[0]["overrides"], "generation.servers=4", "training.ranks=4"]
    assert started[0].keys() == started[1].keys()
    assert capsys.readouterr().out == "Split of devices from run first: 4 servers, 4 ranks.\n"
