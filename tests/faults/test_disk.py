"""The disk that loses power, under programs of a few calls: what was synced is always there, what was not may be gone,
torn or there. What a run ends with is all there, since nobody makes anything of it again."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import areal_core
from areal_core.storage import weights
from tests.faults.disk import Disk, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

_SEEDS = range(40)
_WRITE = "f = os.open('a', os.O_CREAT | os.O_WRONLY); os.write(f, b'x' * 20_000)\n"
_SYNC_FOLDER = "\nd = os.open('.', os.O_RDONLY); os.fsync(d)\n"
_LATER = "subprocess.run([sys.executable, '-c', \"open('a', 'r+b').write(b'later')\"])"
_RENAME = "f = open('b', 'wb'); f.write(b'new'); f.flush(); os.fsync(f.fileno()); os.replace('b', 'old')\n"
_NESTED = "os.makedirs('n/m'); f = os.open('n/m/c', os.O_CREAT | os.O_WRONLY); os.write(f, b'1'); os.fsync(f)\n"


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """With a file `old`, synced."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "old").write_bytes(b"old")
    return Disk(tmp_path / "root", tmp_path / "logs")


def run(disk: Disk, program: str) -> int:
    """Run a program whose working directory is the disk; returns the number of records so far."""
    command = [sys.executable, "-c", f"import os, shutil, sqlite3, subprocess, sys\n{program}"]
    subprocess.run(command, cwd=disk.root, env={**os.environ, **disk.environment()}, check=True)
    return disk.now()


def images(disk: Disk, cut: int, file: str) -> list[bytes | None]:
    """What the disk may hold of a file after `cut`, by seed."""
    found: list[bytes | None] = []
    for seed in _SEEDS:
        target = disk.root.parent / f"image-{cut}-{seed}"
        disk.image(target, cut, seed)
        found.append((target / file).read_bytes() if (target / file).exists() else None)
    return found


def test_unsynced_writes_may_be_there_torn_or_gone(disk: Disk) -> None:
    seen = images(disk, run(disk, _WRITE), "a")
    assert None in seen
    assert {len(data) for data in seen if data is not None} > {0, 20_000}
    assert any(b"\0" in data for data in seen if data)  # a block in the middle is missing


@pytest.mark.parametrize(
    ("program", "file", "held"),
    [
        (f"{_WRITE}os.fsync(f){_SYNC_FOLDER}", "a", {b"xxxxx"}),
        (f"{_WRITE}os.fdatasync(f){_SYNC_FOLDER}", "a", {b"xxxxx"}),
        (f"{_WRITE}os.sync()", "a", {b"xxxxx"}),
        (f"f = os.open('a', os.O_CREAT | os.O_WRONLY | os.O_DSYNC); os.write(f, b'abc'){_SYNC_FOLDER}", "a", {b"abc"}),
        (f"{_WRITE}os.fsync(f){_SYNC_FOLDER}os.pwrite(f, b'yyy', 0)", "a", {b"xxxxx", b"yyyxx"}),
        (f"{_WRITE}os.fsync(f){_SYNC_FOLDER}{_LATER}", "a", {b"xxxxx", b"later"}),
        (_RENAME, "old", {b"old", b"new"}),
        (_RENAME + _SYNC_FOLDER, "old", {b"new"}),
        ("os.unlink('old')", "old", {b"old", None}),
        (f"os.unlink('old'){_SYNC_FOLDER}", "old", {None}),
        (f"{_NESTED}d = os.open('n/m', os.O_RDONLY); os.fsync(d)", "n/m/c", {b"1"}),
        (f"shutil.copyfile('old', 'a'); f = os.open('a', os.O_RDONLY); os.fsync(f){_SYNC_FOLDER}", "a", {b"old"}),
    ],
)
def test_synced_changes_are_there_and_others_may_be(
    disk: Disk, program: str, file: str, held: set[bytes | None]
) -> None:
    assert {data and data[:5] for data in images(disk, run(disk, program), file)} == held


VERSIONS, IMAGES = 3, 30

# In the order of the trainer and the controller, and without a word to SQLite that all is over.
_END = """import os, sys
from pathlib import Path
import numpy as np
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.storage import weights
from areal_core.storage.rundir import write_json
ledger = TrajectoryLedger("ledger.sqlite", group_size=2)
for number in range(1, 1 + int(sys.argv[1])):
    ledger.publish(weights.publish(Path("weights"), number, {"w": np.full(3000, number, np.float32)}))
weights.sync(Path("weights"))
ledger.sync()
write_json(Path("summary.json"), {}, synced=True)
os._exit(0)
"""


def test_a_loss_of_power_after_the_end(disk: Disk, tmp_path: Path) -> None:
    environment = {**os.environ, **disk.environment(), "PYTHONPATH": str(Path(areal_core.__file__).parents[1])}
    command = [sys.executable, "-c", _END, str(VERSIONS)]
    subprocess.run(command, cwd=disk.root, env=environment, check=True)
    for seed in range(IMAGES):
        image = tmp_path / f"image-{seed}"
        disk.image(image, disk.now(), seed)
        assert (image / "summary.json").exists()
        for number in range(1, 1 + VERSIONS):
            assert weights.is_whole(weights.read_manifest(weights.version_folder(image / "weights", number)))
        with closing(sqlite3.connect(image / "ledger.sqlite")) as ledger:
            assert ledger.execute("SELECT MAX(version) FROM versions").fetchone() == (VERSIONS,)
