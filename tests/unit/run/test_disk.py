"""When the room on a disk is told, and when it ends a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_core.config.schema import load
from areal_core.errors import StorageError
from areal_core.run.disk import DiskSpace, disk_space
from areal_core.storage.rundir import RunDir, RunInfo


def free(patch: pytest.MonkeyPatch, gib: dict[str, float]) -> None:
    patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(gib[str(folder)] * 2**30)))


def test_each_folder_is_told_of_once_and_a_nearly_full_one_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    folders = {"state_dir": Path("/a"), "storage.url": Path("/b")}
    disk = DiskSpace(folders, low_gib=5.0, min_gib=0.5, log=lines.append)
    free(monkeypatch, {"/a": 5.0, "/b": 5.0})
    disk.look()
    assert lines == []
    free(monkeypatch, {"/a": 4.0, "/b": 4.9})
    for _ in range(2):
        disk.look()
    assert lines == [
        "state_dir: /a has 4.00 GiB left, less than 5 (launch.disk_low_gib)",
        "storage.url: /b has 4.90 GiB left, less than 5 (launch.disk_low_gib)",
    ]
    free(monkeypatch, {"/a": 4.0, "/b": 0.25})
    with pytest.raises(
        StorageError, match=r"^storage\.url: /b has 0\.25 GiB left, less than 0\.5 \(launch\.disk_min_gib"
    ):
        disk.look()


def test_a_folder_that_is_gone_is_left_to_who_uses_it(tmp_path: Path) -> None:
    DiskSpace({"storage.url": tmp_path / "none"}, low_gib=1e9, min_gib=1e9, log=print).look()


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("/data/store", "/data/store"),
        ("file:///data/a%20b", "/data/a b"),
        ("s3://bucket/prefix", None),
    ],
)
def test_a_store_counts_where_it_is_a_folder(tmp_path: Path, url: str, folder: str | None) -> None:
    config = load({"state_dir": str(tmp_path), "storage": {"url": url}})
    run = RunDir.create(config, RunInfo(run_id="r", model_path="m", checkpoint_url="c"))
    folders = disk_space(run, config, print)._folders
    assert folders == {"state_dir": run.root} | ({"storage.url": Path(folder)} if folder else {})
