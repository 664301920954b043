"""A run whose disk, a small one in memory, is filled up: it ends in order, says why, and goes on once there is room."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.runs import Launched, tiny

pytestmark = [pytest.mark.slow, pytest.mark.recovery]

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
    r"state_dir: \S+ has 0\.0[01] GiB left, less than 0\.0078125 \(launch\.disk_min_gib\): the run ends; with more "
    r"room it can be resumed"
)
# A server that can't write its timeline refuses what it is asked, so that the controller has it killed. What ends
# before an old checkpoint is deleted finds room for a restart. Where others have left a little room since, the log
# could take what the process said.
IS_FULL = (
    r"\S+-0 (exited with code 1|was killed by SIGKILL)( after \d restarts)?; "
    r".*( its disk is full: nothing can be written to \S+/logs|: No space left on device)"
)


@pytest.mark.parametrize(
    ("min_mib", "left_mib", "status", "why"),
    [pytest.param(8, 4, 2, ENDS_AT_THE_BOUND, id="bound"), pytest.param(0, 0, 1, IS_FULL, id="full")],
)
@pytest.mark.nightly
def test_a_run_on_a_full_disk_ends_in_order_and_goes_on_later(
    disk: Path, min_mib: float, left_mib: float, status: int, why: str
) -> None:
    limits = {"disk_min_gib": min_mib / 1024, "disk_low_gib": min_mib / 1024}
    config = tiny(disk, training={"steps": 60, "checkpoint_every": 3}, evaluation={"enabled": False}, launch=limits)
    with Launched(config, "full") as run:
        run.until_step(4)
        fill(disk / "filler", but_mib=left_mib)
        assert run.end() == status
        assert not run.run.summary.exists()
        assert re.fullmatch(f"areal: error: {why}", run.output().rstrip().splitlines()[-1])
        assert "Traceback" not in run.output()
    (disk / "filler").unlink()
    with Launched(config, "full") as run:
        run.finished()
