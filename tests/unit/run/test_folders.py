"""Where the state of a run lies: folders, the room on its disks, MLflow, and policy version 0, made once."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_core.config.schema import load
from areal_core.errors import ConfigError, ModelError, StorageError
from areal_core.models import gguf
from areal_core.run import folders as module
from areal_core.run.folders import DiskSpace, run_folder, tracking_uri
from areal_core.run.preflight import preflight
from areal_core.storage.rundir import RunDir
from areal_core.training.recipe import cache_key
from tests.support.runs import changed


def test_run_folder_and_tracking_uri(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder(dataclasses.replace(load(base), state_dir="here"), "r").root == tmp_path / "here" / "runs" / "r"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    on = changed(base, tracking={"enabled": True})
    assert tracking_uri(load(base)) is None
    assert tracking_uri(on) == f"sqlite:///{base['state_dir']}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker")
    assert tracking_uri(on) == "http://tracker"
    assert tracking_uri(changed(base, tracking={"enabled": True, "uri": "http://mine"})) == "http://mine"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@tracker")
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: must hold no user or password; ") as refused:
        tracking_uri(on)
    assert "hunter2" not in str(refused.value)


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
        "state_dir: /a has 4.00 GiB left, less than 5",
        "state_dir: /a has 19999 inodes left, less than 20000",
        "storage.url: /b c has 4.90 GiB left, less than 5",
        "storage.url: /b c has 19999 inodes left, less than 20000",
    ]
    for gib, inodes, said in (
        (0.25, 10**6, r"0\.25 GiB left, less than 0\.5: the run e"),
        (5.0, 1999, r"1999 inodes left, less than 2000: the run e"),
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


TINY = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate_size": 8}


def test_the_embedded_model_is_made_once(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that only makes the folder, the last of its arguments; the real one makes the models of the ring."""
    monkeypatch.setattr(module, "python", lambda *arguments: ["mkdir", str(arguments[-1])])
    config = load(base | {"model": TINY})
    Path(base["state_dir"]).mkdir()
    lines: list[str] = []
    made = [module.base_model(config, lines.append) for _ in range(2)]
    assert made == [Path(base["state_dir"]).absolute() / "cache" / cache_key(config)] * 2
    assert [line for line in lines if "warming up" in line] == lines[:1]


def test_a_gguf_file_is_converted_once_and_again_when_it_has_changed(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(file.read_text())
        folder.mkdir()

    monkeypatch.setattr(gguf, "convert", convert)
    file = tmp_path / "small.gguf"
    config = load(base | {"model": {"path": str(file)}})
    folders = []
    for content in ("one", "another"):
        file.write_text(content)
        folders += [module.base_model(config, print) for _ in range(2)]
    assert made == ["one", "another"]
    assert (folders[0], folders[2]) == (folders[1], folders[3])
    assert folders[0] != folders[2]
    file.unlink()
    with pytest.raises(ModelError, match=r"^model\.path: .*small\.gguf: No such file or directory$"):
        preflight(config)
