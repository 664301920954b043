"""When the room on a disk is told, and when it ends a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_core.config.schema import LaunchConfig, load
from areal_core.errors import StorageError
from areal_core.run.disk import DiskSpace, disk_space
from areal_core.storage.rundir import RunDir, RunInfo


def free(patch: pytest.MonkeyPatch, gib: dict[str, float], inodes: int = 10**6, of: int = 10**7) -> None:
    patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(gib[str(folder)] * 2**30)))
    patch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=of, f_favail=inodes))


def test_each_shortage_is_told_once_and_a_nearly_full_disk_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    disk = DiskSpace({"state_dir": Path("/a"), "storage.url": Path("/b")}, LaunchConfig(), lines.append)
    free(monkeypatch, {"/a": 5.0, "/b": 5.0}, inodes=20_000)
    disk.look()
    assert lines == []
    free(monkeypatch, {"/a": 4.0, "/b": 4.9}, inodes=19_999)
    for _ in range(2):
        disk.look()
    assert lines == [
        "state_dir: /a has 4.00 GiB left, less than 5 (launch.disk_low_gib)",
        "state_dir: /a has 19999 inodes left, less than 20000 (launch.disk_low_inodes)",
        "storage.url: /b has 4.90 GiB left, less than 5 (launch.disk_low_gib)",
        "storage.url: /b has 19999 inodes left, less than 20000 (launch.disk_low_inodes)",
    ]
    for gib, inodes, said in (
        (0.25, 10**6, r"0\.25 GiB left, less than 0\.5 \(launch\.disk_min_gib"),
        (5.0, 1999, r"1999 inodes left, less than 2000 \(launch\.disk_min_inodes\): the run e"),
    ):
        free(monkeypatch, {"/a": 4.0, "/b": gib}, inodes=inodes)
        with pytest.raises(StorageError, match=rf"^(storage\.url: /b|state_dir: /a) has {said}"):
            disk.look()


def test_unlimited_inodes_are_enough_and_an_absent_folder_is_left_to_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = LaunchConfig(disk_low_gib=1e9, disk_min_gib=1e9)
    DiskSpace({"storage.url": tmp_path / "none"}, launch, pytest.fail).look()
    free(monkeypatch, {"/a": 5.0}, inodes=0, of=0)
    DiskSpace({"state_dir": Path("/a")}, LaunchConfig(), pytest.fail).look()


@pytest.mark.parametrize(
    ("url", "folder"),
    [("/data/store", "/data/store"), ("file:///data/a%20b", "/data/a b"), ("s3://bucket/prefix", None)],
)
def test_a_store_counts_where_it_is_a_folder(tmp_path: Path, url: str, folder: str | None) -> None:
    config = load({"state_dir": str(tmp_path), "storage": {"url": url}})
    run = RunDir.create(config, RunInfo(run_id="r", model_path="m", checkpoint_url="c"))
    folders = disk_space(run, config, print)._folders
    assert folders == {"state_dir": run.root} | ({"storage.url": Path(folder)} if folder else {})
