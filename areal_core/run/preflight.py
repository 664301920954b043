"""Check a configuration on this machine before any process starts, including GPUs and packages."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_core.config.engines import GENERATION_ENGINES, names
from areal_core.config.schema import RunConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.registry import open_environment
from areal_core.environments.source import PromptSource, digests, open_source
from areal_core.errors import (
    ConfigError,
    ModelError,
    ProcessError,
    RewardError,
    RewardTimeoutError,
    UserCodeError,
    VerifierError,
)
from areal_core.generation.vllm.server import check_installed
from areal_core.models.adapters import trained_shapes
from areal_core.models.spec import check_folder, read_spec
from areal_core.models.tokenizer import Tokenizer, char_tokenizer
from areal_core.planning.footprint import GIB, check_footprint
from areal_core.planning.time_model import TimeModel
from areal_core.rewards.worker import judge_in_own_worker
from areal_core.run.folders import Log, model_folder, tracking_uri
from areal_core.run.roles import interpreter, visible_gpus
from areal_core.storage.objects import Storage
from areal_core.types import Prompt

_NVIDIA_SMI_S = 30.0


def preflight(config: RunConfig, log: Log = print, *, resumed: bool = False) -> dict[str, str]:
    """Check folders, model, prompts, storage and tracking; return the digests of the prompts.

    Creates missing folders. A `resumed` run needs no tracking server, because its points wait in the outbox.

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
        TimeModel(config.emulation)  # raises ConfigError for a time model that does not fit
    _check_address(config.launch.address)
    if config.launch.accelerator == "cuda" and not config.remote_roles:  # else each machine has its own share of GPUs
        found = len(visible_gpus())
        if found < config.launch.devices:
            raise ConfigError(f"launch.devices: must be at most {found}, the visible GPUs, got {config.launch.devices}")
    if config.generation_traits.own_server or (config.evaluated and config.evaluation_traits.own_server):
        try:
            check_installed(interpreter(config.generation.vllm.python))
        except ProcessError as error:
            raise ConfigError(f"generation.vllm.python: {error}") from None
    if config.model.path is None:
        source = open_source(config, char_tokenizer(), functools.partial(_check_task, log))
    else:
        with _model_path():
            folder = model_folder(config, log)
        source = _check_model(folder, config, log)
        if config.launch.accelerator == "cuda" and not config.emulated:
            check_footprint(config, read_spec(folder), device_memory(config))
    Storage.open(config.storage.url, config.storage.endpoint_url)
    if not resumed and (uri := tracking_uri(config)):
        from areal_core.tracking.mlflow_client import check_reachable  # imported here because the import takes seconds

        check_reachable(uri)
    return digests(source)


def _check_address(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(f"launch.address: can't listen on {address}: {error.strerror}") from error


@contextmanager
def _model_path(where: str = "") -> Iterator[None]:
    """Name the field model.path, and `where`, in every ModelError raised within the `with`."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"model.path: {where}{error}") from error


def _check_model(folder: Path, config: RunConfig, log: Log) -> PromptSource:
    """Check that a model folder is complete and fits the task: shape, weight headers, tokenizer, prompts."""
    with _model_path():
        spec, tokenizer = check_folder(folder), Tokenizer.from_folder(folder)
    needed = config.context
    if spec.context < needed:
        raise ConfigError(
            f"task.max_new_tokens: prompt and completion need {needed} tokens (max_prompt_tokens + max_new_tokens), "
            f"more than the context of {folder}, {spec.context}"
        )
    ends = [Dialogue(its.task.chat, tokenizer).stop_token_ids(folder) for its in config.by_task.values()]
    if not all(ends):
        raise ModelError(
            f"model.path: {folder} has no eos_token_id, so no completion would ever end; set it in config.json"
        )
    for token in set[int]().union(*ends) - set(spec.eos_token_ids):
        text = tokenizer.decode([token], special=True)
        log(
            f"task.chat: completions also end at {text!r}, which ends turns in the chat template but is no eos_token_id"
        )
    trained_shapes(spec, config.training.lora.adapter)  # checks that the model has the target layers of LoRA
    if spec.transformers is not None:
        _check_engines(config, folder, spec.transformers.why)
    with _model_path(f"{folder}: "):
        return open_source(config, tokenizer, functools.partial(_check_task, log))


def _check_engines(config: RunConfig, folder: Path, why: str) -> None:
    """Check that an engine can serve a model that only transformers can train: vLLM, or a custom engine."""
    engines = {"generation": (config.generation.engine, config.generation_traits)}
    if config.evaluated:
        engines["evaluation"] = config.evaluation_engine, config.evaluation_traits
    for field, (engine, traits) in engines.items():
        if not traits.any_model:
            wanted, lack = names(GENERATION_ENGINES, "own_server"), f"which does not support this model: {why}"
            raise ConfigError(f"{field}.engine: must be {wanted} for {folder}, got {engine!r}, {lack}")


def _check_task(log: Log, config: RunConfig, tokenizer: Tokenizer, source: PromptSource) -> None:
    """Check that prompts, environment and verifier exist and match the tokenizer.
    Raises UserCodeError for a verifier that fails on the first prompt."""
    open_environment(config, tokenizer)
    held_out = source.held_out()
    if first := ([source.prompt(0)] if config.task.trains else held_out[:1]):
        _try_verifier(config, first[0], log)


def _try_verifier(config: RunConfig, task: Prompt, log: Log) -> None:
    """Let the verifier score one gold answer in a separate process, to find bugs before the run starts.

    Raises UserCodeError, with traceback, prompt and completion, if the verifier raises, hangs, dies or returns no score
    from 0 to 1.
    """
    try:
        found = judge_in_own_worker(config, "", task, task.answer)
    except (VerifierError, RewardTimeoutError) as error:
        raise UserCodeError(str(error)) from None
    except RewardError as error:
        log(f"{config.environment.judged_by} has no result for the gold answer of the first prompt: {error}")
        return
    if found.failure is not None:
        raise UserCodeError(found.failure)


def device_memory(config: RunConfig) -> float:
    """Bytes of the smallest GPU of the run: launch.device_memory_gib, else as nvidia-smi reports.
    Raises ConfigError if nvidia-smi can't be run."""
    if config.launch.device_memory_gib is not None:
        return config.launch.device_memory_gib * GIB
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if gpus := visible_gpus()[: config.launch.devices]:
        command.append(f"--id={','.join(gpus)}")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
        return min(int(line) for line in asked.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"launch.device_memory_gib: must be set where nvidia-smi can't report it ({error})") from None
