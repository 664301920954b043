"""What a run ends with, on a disk that loses power afterwards: nobody makes anything of it again."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import areal_core
from areal_core.errors import StorageError
from areal_core.storage import weights
from tests.faults.disk import Disk, compiler

VERSIONS, IMAGES = 3, 30

# In the order of the trainer and the controller, and without a word to SQLite that all is over.
_PROGRAM = """import os, sys
from pathlib import Path
import numpy as np
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.storage import weights
from areal_core.storage.rundir import write_json
ledger = TrajectoryLedger("ledger.sqlite", group_size=2)
for number in range(1, 1 + int(sys.argv[1])):
    ledger.publish(weights.publish(Path("weights"), number, {"w": np.full(3000, number, np.float32)}))
if "weights" in sys.argv:
    weights.sync(Path("weights"))
if "ledger" in sys.argv:
    ledger.sync()
write_json(Path("summary.json"), {}, synced=True)
os._exit(0)
"""


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("synced", "kept"),
    [(("weights", "ledger"), True), (("weights",), False), (("ledger",), False)],
    ids=["all is synced", "the ledger is not", "versions are not"],
)
def test_a_loss_of_power_after_the_end(tmp_path: Path, synced: tuple[str, ...], kept: bool) -> None:
    (tmp_path / "root").mkdir()
    disk = Disk(tmp_path / "root", tmp_path / "logs")
    environment = {**os.environ, **disk.environment(), "PYTHONPATH": str(Path(areal_core.__file__).parents[1])}
    command = [sys.executable, "-c", _PROGRAM, str(VERSIONS), *synced]
    subprocess.run(command, cwd=disk.root, env=environment, check=True)
    whole: list[bool] = []
    for seed in range(IMAGES):
        image = tmp_path / f"image-{seed}"
        disk.image(image, disk.now(), seed)
        assert (image / "summary.json").exists()
        whole.append(_has_all(image))
    assert all(whole) == kept


def _has_all(image: Path) -> bool:
    """Whether the versions are there, whole, and the ledger knows the last one."""
    for number in range(1, 1 + VERSIONS):
        try:
            version = weights.read_manifest(weights.version_folder(image / "weights", number))
        except StorageError:
            return False
        if not weights.is_whole(version):
            return False
    with closing(sqlite3.connect(image / "ledger.sqlite")) as ledger:
        try:
            return ledger.execute("SELECT MAX(version) FROM versions").fetchone() == (VERSIONS,)
        except sqlite3.DatabaseError:  # it holds less than its first transaction
            return False
