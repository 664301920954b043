"""From a configuration to a run's folder that processes can start from.

Whatever can be found wrong is found here, before anything is started. Making the base model and opening the tracking
run happen once; a run that was here before is adopted.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.environments.registry import open_environment
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError, ModelError, ProcessError
from areal_core.generation.vllm.server import check_installed
from areal_core.launch.supervisor import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.models.spec import check_folder, read_spec
from areal_core.models.tokenizer import Tokenizer, char_tokenizer
from areal_core.planning.footprint import GIB, Footprint, check_footprint
from areal_core.planning.time_model import check_emulation
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.tracking.outbox import Outbox
from areal_core.training.recipe import cache_key
from areal_core.types import Prompt

Log = Callable[[str], None]

_TAGGED_PACKAGES = ("areal", "torch", "transformers", "numpy", "mlflow", "prefect")
# Between a run and its resumption.
_MAY_CHANGE = r"training\.(steps|engine|zero_stage|ranks|hosts|collective_timeout_s)|(stop|launch)\..*|state_dir"
_MAY_MOVE = rf"{_MAY_CHANGE}|(model|task)\.(held_out_)?path|(storage|tracking)\..*"  # when it is resumed elsewhere
_OWNER_S = 5.0  # beyond launch.stop_timeout_s, for the processes of an earlier launcher to end
_NVIDIA_SMI_S = 30.0
_WARMUP_LOCK_S = 1800.0  # for another run to make the same base model


def preflight(config: RunConfig) -> None:
    """Check what a run will need: folders, model, prompts, storage, tracking. Makes what is absent and may be made.

    Raises ConfigError, ModelError, StorageError or TrackingError with one line that names the field.
    """
    probe = Path(config.state_dir) / f".probe-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"state_dir: can't write to {probe.parent}: {error.strerror}") from error
    if config.emulated:
        check_emulation(config.emulation)
    _check_address(config.launch.address)
    if config.launch.accelerator == "cuda" and not config.elsewhere:  # else its machines have a share of them each
        found = len(visible_gpus())
        if found < config.launch.devices:
            raise ConfigError(
                f"launch.devices: must be at most {found}, the GPUs to be seen, got {config.launch.devices}"
            )
    if config.generation.engine == "vllm":
        try:
            check_installed(interpreter(config.generation.vllm.python))
        except ProcessError as error:
            raise ConfigError(f"generation.vllm.python: {error}") from None
    if config.model.path is None:
        _check_task(config, char_tokenizer())
    else:
        _check_model(Path(config.model.path), config)
        if config.launch.accelerator == "cuda" and not config.emulated:
            plan(config)
    Storage.open(config.storage.url, config.storage.endpoint_url)
    if uri := tracking_uri(config):
        from areal_core.tracking.mlflow_client import check_reachable  # seconds of imports

        check_reachable(uri)


def _check_address(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(f"launch.address: this machine can't listen on {address}: {error.strerror}") from error


def plan(config: RunConfig) -> Footprint:
    """What the model of `model.path` needs of GPUs. Raises ConfigError for what can't be placed or does not fit, and
    ModelError for a folder without a sound config.json."""
    if config.model.path is None:
        raise ConfigError("model.path: must be given, a folder whose config.json says how large the model is")
    try:
        spec = read_spec(config.model.path)
    except ModelError as error:
        raise ModelError(f"model.path: {error}") from error
    return check_footprint(config, spec, device_memory(config))


def prepare(
    config: RunConfig,
    *,
    run_id: str | None = None,
    flow_run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    log: Log = print,
) -> RunDir:
    """Make everything that the processes of a run start from; adopt what is there when `run_id` has been here before.
    `tags` are for the tracking run, beside those that every run has.

    Raises what `preflight` raises, ConfigError for a resumed run whose configuration differs, ProcessError when the
    warm-up of the base model fails or the run is running already.
    """
    run_id = run_id or _new_run_id(config.label)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", run_id):
        raise ConfigError(f"run_id: must be letters, digits, dots, dashes and underscores, got {run_id!r}")
    run = run_folder(config, run_id)
    resumed = (run.root / "run.json").exists()
    if resumed:
        _check_unchanged(run.config().to_dict(), config, _MAY_CHANGE)
        if run.summary.exists():
            log(f"run {run_id} has finished before")
            return run
    preflight(config)
    if not resumed:
        storage = Storage.open(config.storage.url, config.storage.endpoint_url).child(f"runs/{run_id}")
        if elsewhere := checkpoint.newest(storage):
            _check_unchanged(elsewhere.extra["config"], config, _MAY_MOVE)
        model = base_model(config, log)
        tracking_run_id = _start_tracking(config, run_id, _tags(config, run_id, flow_run_id) | dict(tags or {}))
        info = RunInfo(
            run_id=run_id,
            model_path=str(model),
            checkpoint_url=storage.url,
            tracking_uri=tracking_uri(config),
            tracking_run_id=tracking_run_id,
            flow_run_id=flow_run_id,
        )
        return RunDir.create(config, info)
    with sole_owner(run, config):
        log(f"run {run_id} goes on where it ended")
        outbox = Outbox(run.outbox, run_id)
        outbox.reopen()
        outbox.close()
        return RunDir.create(config, dataclasses.replace(run.info(), flow_run_id=flow_run_id or run.info().flow_run_id))


def run_folder(config: RunConfig, run_id: str) -> RunDir:
    return RunDir(Path(config.state_dir).absolute() / "runs" / run_id)


def tracking_uri(config: RunConfig) -> str | None:
    """Where MLflow is: tracking.uri, MLFLOW_TRACKING_URI, or a SQLite file in the state folder; None when off."""
    if not config.tracking.enabled:
        return None
    if uri := config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    folder = Path(config.state_dir).absolute() / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


def _new_run_id(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _check_model(folder: Path, config: RunConfig) -> None:
    """A model folder must be whole and fit the task: its shape, the headers of its weights, tokenizer and prompts."""
    try:
        spec, tokenizer = check_folder(folder), Tokenizer.from_folder(folder)
    except ModelError as error:
        raise ModelError(f"model.path: {error}") from error
    needed = config.task.max_prompt_tokens + config.task.max_new_tokens
    if spec.context < needed:
        raise ConfigError(
            f"task.max_new_tokens: prompt and answer need {needed} tokens (max_prompt_tokens + max_new_tokens), "
            f"more than the context of {folder}, {spec.context}"
        )
    if not spec.eos_token_ids:
        raise ModelError(f"model.path: {folder} names no eos_token_id, so that no answer would ever end")
    try:
        prompts = _check_task(config, tokenizer)
    except ModelError as error:
        raise ModelError(f"model.path: {folder}: {error}") from error
    highest = max((token for prompt in prompts for token in prompt.token_ids), default=0)
    if highest >= spec.vocab_size:
        raise ModelError(
            f"model.path: {folder}: its tokenizer gives token {highest}, config.json has vocab_size {spec.vocab_size}"
        )


def _check_task(config: RunConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts, environment and verifier must be there and go with the tokenizer. Returns the held-out prompts."""
    open_environment(config.environment, config.task, config.algorithm, tokenizer)
    return open_source(config, tokenizer).held_out()


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


def _start_tracking(config: RunConfig, run_id: str, tags: Mapping[str, str]) -> str | None:
    uri = tracking_uri(config)
    if uri is None:
        return None
    from areal_core.tracking.mlflow_client import start_run  # seconds of imports

    return start_run(uri, config.tracking.experiment, run_id, tags, config.to_dict())


def _tags(config: RunConfig, run_id: str, flow_run_id: str | None) -> dict[str, str]:
    """What runs are told apart by, and what this one was made with, beside its configuration."""
    tags = {
        "areal.emulated": config.emulated_cluster,
        "mode": config.mode,
        "eta": str(config.max_staleness),
        "seed": str(config.seed),
        "objective": config.algorithm.objective,
        "areal.run_id": run_id,
        "areal.flow_run_id": flow_run_id,
        "areal.git_revision": _git_revision(),
    }
    for package in _TAGGED_PACKAGES:
        try:
            tags[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a package that this installation does without
    return {name: value for name, value in tags.items() if value}


def _git_revision() -> str | None:
    """The commit of this source tree, marked when files differ from it; None outside of a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _check_unchanged(before: dict[str, Any], now: RunConfig, may_change: str) -> None:
    """Raises ConfigError naming the first field that differs and that a resumed run must keep."""
    new = dict(_leaves(now.to_dict()))
    for name, old in _leaves(before):
        if new.get(name) != old and not re.fullmatch(may_change, name):
            raise ConfigError(
                f"{name}: must be {old!r} as when this run was started, got {new.get(name)!r}; "
                "a resumed run may only change launch, stop, and of training engine, zero_stage, ranks, hosts, steps "
                "and collective_timeout_s"
            )


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def sole_owner(run: RunDir, config: RunConfig) -> FileLock:
    """Wait for what an earlier launcher left dying; refuse a run that somebody else is running."""
    patience_s = config.launch.stop_timeout_s + _OWNER_S
    busy = f"run_id: {run.root.name} is running already; wait for its end or choose another"
    return FileLock(run.head, timeout_s=patience_s, busy=busy)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES has it; all of the machine's where it is unset."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def device_memory(config: RunConfig) -> float:
    """Bytes of the smallest GPU that the run may use: launch.device_memory_gib, else what nvidia-smi says. Raises
    ConfigError when it can't be asked."""
    if config.launch.device_memory_gib is not None:
        return config.launch.device_memory_gib * GIB
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if gpus := visible_gpus()[: config.launch.devices]:
        command.append(f"--id={','.join(gpus)}")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
        return min(int(line) for line in asked.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"launch.device_memory_gib: must be given where nvidia-smi can't be asked for it ({error})"
        ) from None


def interpreter(path: str | None) -> str:
    """The Python that runs vLLM: a path, from the working directory, or this one."""
    return sys.executable if path is None else os.path.abspath(path)  # not resolved: a venv's is a link


def python(module: str, *arguments: Any) -> list[str]:
    """The command line of a module of this package, run by this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]
