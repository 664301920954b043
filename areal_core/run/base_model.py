"""Policy version 0: a folder of the user's, or of the Hub; one made of a GGUF file of the user's, once; or the embedded
model, which a supervised warm-up makes once a recipe."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.errors import ModelError, ProcessError
from areal_core.launch.supervisor import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.models import hub
from areal_core.run.folders import Log
from areal_core.run.machine import python
from areal_core.storage.rundir import RunDir, write_json
from areal_core.training.recipe import cache_key

_CONVERSION = 2  # raised where a GGUF file becomes another folder than before
_WARMUP_LOCK_S = 1800.0  # for another run to make the same base model


def base_model(config: RunConfig, log: Log) -> Path:
    """The folder of policy version 0: the user's, or the embedded model, made once for all runs of one recipe."""
    if config.model.path is not None:
        return model_folder(config, log)
    return _made_once(config, cache_key(config), partial(_warm_up, config, log))


def model_folder(config: RunConfig, log: Log) -> Path:
    """The folder of `model.path`: itself, what the Hub has under a name, or what is made of a GGUF file. Raises
    ModelError for what can't be had or read, or is not supported."""
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
    """A folder of the cache, which the first of all runs that need it makes."""
    cache = Path(config.state_dir).absolute() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    lock = cache / f"{name}.lock"
    busy = f"state_dir: {lock} is still held by another run, which makes its base model"
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
        raise ProcessError(f"warmup-0 exited with code 0 and left no {folder}")
