"""`make prune`, on a run that was stopped and is resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from areal_core.run.command import run_command
from areal_core.storage.objects import Storage
from flows import prune_command
from tests.support.runs import Launched, tiny

pytestmark = pytest.mark.slow


@pytest.mark.end_to_end
def test_run_without_its_leftovers_resumes_and_is_deleted_once_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, training={"steps": 40, "checkpoint_every": 2}, evaluation={"enabled": False})
    given = [f"state_dir={config.state_dir}", f"storage.url={config.storage.url}"]

    def prune(*options: str) -> tuple[int, str, str]:
        status = run_command(lambda: prune_command.main([*options, *given]))
        told = capsys.readouterr()
        return status, told.out, told.err

    def row(table: str) -> list[str]:
        (found,) = (line.split() for line in table.splitlines() if line.startswith("first "))
        return found

    with Launched(config, "first") as run:
        run.until_step(3)
        status, out, _ = prune()
        assert (status, "running" in row(out)) == (0, True)
        assert prune("--run", "first", "--yes")[::2] == (2, "areal: error: RUN: first is running; stop it first\n")
        run.launcher.send_signal(signal.SIGTERM)
        assert run.end() == 143
    store = Storage.open(config.storage.url).child("runs/first")
    store.put_bytes("checkpoints/step-000099.1/optimizer.safetensors", bytes(5_000_000))
    status, out, _ = prune()
    assert (status, "stopped" in row(out)) == (0, True)
    assert (float(row(out)[-2]) >= 5, row(out)[-1]) == (True, "MB")
    assert prune("--run", "first")[0] == 1  # nobody says yes
    assert "checkpoints/step-000099.1/optimizer.safetensors" in store.list()
    assert prune("--yes")[0] == 0
    assert "checkpoints/step-000099.1/optimizer.safetensors" not in store.list()
    with Launched(config, "first") as run:
        run.finished()
    assert "finished" in row(prune()[1])
    assert prune("--older", "1", "--yes")[0] == 0  # it is younger
    assert run.run.summary.exists()
    status, out, _ = prune("--run", "first", "--yes")
    assert (status, out.splitlines()[-1].startswith("first: ")) == (0, True)
    assert not run.run.root.exists()
    assert store.list() == ("lease.json",)
    assert prune()[1].startswith("No runs in ")
