"""Local state of runs: their folders, free disk space, the MLflow database and the base models.

Policy version 0 comes from one of three places. A user names a model folder or a model of the Hub. Or the user names a
GGUF file, which is converted once. Or a supervised warm-up makes the embedded model, once per recipe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from areal_core.config.fields import refuse_credentials
from areal_core.config.groups import MLFLOW_CREDENTIALS
from areal_core.config.schema import RunConfig
from areal_core.errors import ModelError, ProcessError, StorageError
from areal_core.launch.supervisor import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.models import hub
from areal_core.run.roles import python
from areal_core.storage.durable import free_inodes
from areal_core.storage.rundir import RunDir, write_json
from areal_core.training.recipe import cache_key

Log = Callable[[str], None]
_WARMUP_LOCK_S = 1800.0  # wait for another run that makes the same base model
_CONVERSION = 2  # increased whenever the conversion of a GGUF file gives another result
_GIB = 2**30
LOW_INODES, _LEAST_INODES = 20_000, 2_000  # a run warns below the first and ends in order below the second


def run_folder(config: RunConfig, run_id: str) -> RunDir:
    return RunDir(Path(config.state_dir).absolute() / "runs" / run_id)


def with_final_model(config: RunConfig) -> RunConfig:
    """The configuration with the final model of a run, where `model.path` is the name of a run.
    Raises ModelError for a run that has no final model."""
    assert config.model.path is not None
    final = run_folder(config, config.model.path).root / "final"
    if not os.path.isdir(final):  # unlike Path.is_dir, it takes names that are too long for a file
        if os.path.isfile(final.with_name("config.json")) and not os.path.exists(config.model.path):
            raise ModelError(f"model.path: run {config.model.path} has no final model; resume it to its end")
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(final)))


def tracking_uri(config: RunConfig) -> str | None:
    """Address of MLflow, or None if tracking is off. Raises ConfigError for credentials in the variable.
    The address is tracking.uri, else MLFLOW_TRACKING_URI, else a SQLite file in the state folder."""
    if not config.tracking.enabled:
        return None
    if config.tracking.uri:
        return config.tracking.uri
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        refuse_credentials("MLFLOW_TRACKING_URI", uri, MLFLOW_CREDENTIALS)
        return uri
    folder = Path(config.state_dir).absolute() / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


class DiskSpace:
    """Checks free space in the folder of a run, and in its store if the store is a folder."""

    def __init__(self, run: RunDir, config: RunConfig, log: Log) -> None:
        store = store_folder(config.storage.url)
        self._folders = {"state_dir": run.root} | ({} if store is None else {"storage.url": store})
        self._launch, self._log = config.launch, log
        self._warned: set[tuple[str, str]] = set()

    def check(self) -> None:
        """Warn once per folder with less than `launch.disk_low_gib` free, or with few inodes.
        Raises StorageError below `launch.disk_min_gib`, and for very few inodes."""
        for field, folder in self._folders.items():
            try:
                gib, inodes = shutil.disk_usage(folder).free / _GIB, free_inodes(folder)
            except OSError:
                continue  # reads and writes of that folder report the error
            launch, where = self._launch, f"{field}: {folder}"
            self._compare(where, f"{gib:.2f}", "GiB", gib, launch.disk_low_gib, launch.disk_min_gib)
            if inodes is not None:
                self._compare(where, f"{inodes}", "inodes", inodes, LOW_INODES, _LEAST_INODES)

    def _compare(self, where: str, shown: str, unit: str, free: float, low: float, least: float) -> None:
        left = f"{where} has {shown} {unit} left, less than"
        if free < least:
            raise StorageError(f"{left} {least:g}: the run stops; free some space, then resume it")
        if free < low and (where, unit) not in self._warned:
            self._warned.add((where, unit))
            self._log(f"{left} {low:g}")


def store_folder(url: str) -> Path | None:
    """The folder of a store, or None if the store is not a local folder."""
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    return None if "://" in url else Path(url)


def base_model(config: RunConfig, log: Log) -> Path:
    """The folder of policy version 0: the user's model, or the embedded one, made once per recipe."""
    if config.model.path is not None:
        return model_folder(config, log)
    return _made_once(config, cache_key(config), partial(_warm_up, config, log))


def model_folder(config: RunConfig, log: Log) -> Path:
    """The folder of `model.path`: itself, a model downloaded from the Hub, or a converted GGUF file.
    Raises ModelError for a model that is missing, unreadable or unsupported."""
    assert config.model.path is not None
    if config.model.path.startswith(hub.PREFIX):
        return hub.fetch(config.model.path)
    path = Path(config.model.path).absolute()
    if path.suffix != ".gguf":
        return path

    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    content = hashlib.blake2b(f"{_CONVERSION} {path} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6)
    return _made_once(config, f"{path.stem}-{content.hexdigest()}", partial(_convert, path, log))


def _made_once(config: RunConfig, name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the cache; the first run that needs the folder makes it, and other runs wait."""
    cache = Path(config.state_dir).absolute() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    lock = cache / f"{name}.lock"
    busy = f"state_dir: another run holds {lock} to prepare its base model; start again once it is done"
    with FileLock(lock, timeout_s=_WARMUP_LOCK_S, busy=busy):
        if not folder.exists():
            make(folder)
    return folder


def _convert(path: Path, log: Log, folder: Path) -> None:
    from areal_core.models.gguf import convert

    log(f"converting {path.name}; later runs reuse {folder}")
    convert(path, folder)


def _warm_up(config: RunConfig, log: Log, folder: Path) -> None:
    log(f"warming up the base model; later runs reuse {folder}")
    work = RunDir(folder.with_name(f"{folder.name}.warmup"))
    for path in (work.ready, work.logs):
        path.mkdir(parents=True, exist_ok=True)
    write_json(work.root / "config.json", config.to_dict())
    argv = python("areal_core.training.warmup", "--config", work.root / "config.json", "--out", folder)
    spec = RoleSpec(name="warmup", argv=lambda index: argv, announces=False)
    launch = dataclasses.replace(config.launch, restarts=0)
    Supervisor(work, spec, launch, stop=StopSignal(), log=log).run()
    if not folder.exists():
        raise ProcessError(f"warmup-0 exited with code 0 without writing {folder}")
