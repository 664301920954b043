"""The ready files of a run's processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.storage.rundir import RunDir, write_json


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.ready.mkdir()
    return made


def test_ready_processes(run: RunDir) -> None:
    assert run.ready_info("controller") is None
    write_json(run.ready_file("controller"), {"pid": 7, "url": "http://10.0.0.1:80"})
    assert run.ready_info("controller") == {"pid": 7, "url": "http://10.0.0.1:80"}
    assert run.controller_url() == "http://10.0.0.1:80"
    run.forget_ready()
    assert run.controller_url() is None
    assert not list(run.ready.iterdir())


@pytest.mark.parametrize("half", [b"", b'{"pid": 7, "u', b"\xff"])
def test_a_file_that_is_half_there_is_not_ready_yet(run: RunDir, half: bytes) -> None:
    run.ready_file("controller").write_bytes(half)
    assert run.ready_info("controller") is None


def test_a_file_that_can_not_be_read_is_not_ready_yet(run: RunDir) -> None:
    run.ready_file("controller").mkdir()  # any OSError but that of a file that is absent
    assert run.ready_info("controller") is None
