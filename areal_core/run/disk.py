"""Watches the free space and inodes of a run's disks: warns, and ends the run in order before there are none."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from areal_core.config.schema import RunConfig
from areal_core.errors import StorageError
from areal_core.run.folders import Log
from areal_core.storage.durable import free_inodes
from areal_core.storage.rundir import RunDir

_GIB = 2**30


class DiskSpace:
    """Looks at the folders that a run fills: its own, and its store, where that is one."""

    def __init__(self, run: RunDir, config: RunConfig, log: Log) -> None:
        store = store_folder(config.storage.url)
        self._folders = {"state_dir": run.root} | ({} if store is None else {"storage.url": store})
        self._launch, self._log = config.launch, log
        self._told: set[tuple[str, str]] = set()

    def look(self) -> None:
        """Warn once of a folder with less than `launch.disk_low_*`. Raises StorageError below `launch.disk_min_*`."""
        for field, folder in self._folders.items():
            try:
                free = {"GiB": shutil.disk_usage(folder).free / _GIB, "inodes": free_inodes(folder)}
            except OSError:
                continue  # who reads or writes there says more
            for unit, count in free.items():
                if count is not None:
                    self._compare(field, folder, count, unit)

    def _compare(self, field: str, folder: Path, free: float, unit: str) -> None:
        low, least = (getattr(self._launch, f"disk_{what}_{unit.lower()}") for what in ("low", "min"))
        left = f"{field}: {folder} has {free:.{2 if unit == 'GiB' else 0}f} {unit} left"
        if free < least:
            raise StorageError(
                f"{left}, less than {least:g} (launch.disk_min_{unit.lower()}): the run ends; with more room it can be "
                "resumed"
            )
        if free < low and (field, unit) not in self._told:
            self._told.add((field, unit))
            self._log(f"{left}, less than {low:g} (launch.disk_low_{unit.lower()})")


def store_folder(url: str) -> Path | None:
    """The folder that a store is; None for one that is elsewhere."""
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    return None if "://" in url else Path(url)
