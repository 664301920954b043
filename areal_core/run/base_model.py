"""Policy version 0: a folder of the user's, or the embedded model, which a supervised warm-up makes once a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.errors import ProcessError
from areal_core.launch.supervisor import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.run.folders import Log
from areal_core.run.machine import python
from areal_core.storage.rundir import RunDir, write_json
from areal_core.training.recipe import cache_key

_WARMUP_LOCK_S = 1800.0  # for another run to make the same base model


def base_model(config: RunConfig, log: Log) -> Path:
    """The folder of policy version 0: the user's, or the embedded model, made once for all runs of one recipe."""
    if config.model.path is not None:
        return Path(config.model.path).absolute()
    cache = Path(config.state_dir).absolute() / "cache"
    cache.mkdir(exist_ok=True)
    folder = cache / cache_key(config)
    lock = cache / f"{folder.name}.lock"
    with FileLock(lock, timeout_s=_WARMUP_LOCK_S, busy=f"state_dir: {lock} is still held by another run's warm-up"):
        if not folder.exists():
            log(f"warming up the base model, once for all runs of this recipe: {folder}")
            _warm_up(config, folder, log)
    return folder


def _warm_up(config: RunConfig, folder: Path, log: Log) -> None:
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
