"""When the room on a disk is told, and when it ends a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_core.config.schema import load
from areal_core.errors import StorageError
from areal_core.run.folders import DiskSpace
from areal_core.storage.rundir import RunDir


def free(patch: pytest.MonkeyPatch, gib: dict[str, float], inodes: int = 10**6, of: int = 10**7) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        if str(folder) not in gib:
            raise FileNotFoundError
        return SimpleNamespace(free=int(gib[str(folder)] * 2**30))

    patch.setattr(shutil, "disk_usage", usage)
    patch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=of, f_favail=inodes))


def space(store: str, log: Callable[[str], None]) -> DiskSpace:
    return DiskSpace(RunDir(Path("/a")), load({"storage": {"url": store}}), log)


def test_each_shortage_is_told_once_and_a_nearly_full_disk_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    disk = space("file:///b%20c", lines.append)
    free(monkeypatch, {"/a": 5.0, "/b c": 5.0}, inodes=20_000)
    disk.look()
    assert lines == []
    free(monkeypatch, {"/a": 4.0, "/b c": 4.9}, inodes=19_999)
    for _ in range(2):
        disk.look()
    assert lines == [
        "state_dir: /a has 4.00 GiB left, less than 5 (launch.disk_low_gib)",
        "state_dir: /a has 19999 inodes left, less than 20000 (launch.disk_low_inodes)",
        "storage.url: /b c has 4.90 GiB left, less than 5 (launch.disk_low_gib)",
        "storage.url: /b c has 19999 inodes left, less than 20000 (launch.disk_low_inodes)",
    ]
    for gib, inodes, said in (
        (0.25, 10**6, r"0\.25 GiB left, less than 0\.5 \(launch\.disk_min_gib"),
        (5.0, 1999, r"1999 inodes left, less than 2000 \(launch\.disk_min_inodes\): the run e"),
    ):
        free(monkeypatch, {"/a": 4.0, "/b c": gib}, inodes=inodes)
        with pytest.raises(StorageError, match=rf"^(storage\.url: /b c|state_dir: /a) has {said}"):
            disk.look()


@pytest.mark.parametrize("store", ["s3://bucket/prefix", "/absent"])
def test_unlimited_inodes_are_enough_and_other_stores_are_left_to_their_users(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    free(monkeypatch, {"/a": 5.0}, inodes=0, of=0)
    space(store, pytest.fail).look()
