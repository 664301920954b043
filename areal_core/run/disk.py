"""Room on the disks of a run: told when it gets short, and the run ended in order before there is none."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from areal_core.config.schema import RunConfig
from areal_core.errors import StorageError
from areal_core.run.folders import Log
from areal_core.storage.rundir import RunDir

_GIB = 2**30


class DiskSpace:
    """Looks at the folders that a run fills: its own, and its store, where that is one."""

    def __init__(self, folders: Mapping[str, Path], *, low_gib: float, min_gib: float, log: Log) -> None:
        """`folders` by the fields that move them."""
        self._folders = dict(folders)
        self._low_gib, self._min_gib = low_gib, min_gib
        self._log = log
        self._told: set[str] = set()

    def look(self) -> None:
        """Warn once of a folder with less than `low_gib`. Raises StorageError for one with less than `min_gib`."""
        for field, folder in self._folders.items():
            try:
                free_gib = shutil.disk_usage(folder).free / _GIB
            except OSError:
                continue  # who reads or writes there says more
            if free_gib < self._min_gib:
                raise StorageError(
                    f"{field}: {folder} has {free_gib:.2f} GiB left, less than {self._min_gib:g} "
                    "(launch.disk_min_gib): the run ends; with more room it can be resumed"
                )
            if free_gib < self._low_gib and field not in self._told:
                self._told.add(field)
                self._log(
                    f"{field}: {folder} has {free_gib:.2f} GiB left, less than {self._low_gib:g} (launch.disk_low_gib)"
                )


def disk_space(run: RunDir, config: RunConfig, log: Log) -> DiskSpace:
    """That of a run."""
    folders = {"state_dir": run.root}
    if (store := _folder(config.storage.url)) is not None:
        folders["storage.url"] = store
    return DiskSpace(folders, low_gib=config.launch.disk_low_gib, min_gib=config.launch.disk_min_gib, log=log)


def _folder(url: str) -> Path | None:
    """The folder that a store is; None for one that is elsewhere."""
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    return None if "://" in url else Path(url)
