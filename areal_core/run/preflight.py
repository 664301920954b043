"""All checks of a configuration on this machine, made before anything is started: its GPUs and packages among them."""

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
from areal_core.rewards.worker import outcome_apart
from areal_core.run.folders import Log, model_folder, tracking_uri
from areal_core.run.roles import interpreter, visible_gpus
from areal_core.storage.objects import Storage
from areal_core.types import Prompt

_NVIDIA_SMI_S = 30.0


def preflight(config: RunConfig, log: Log = print, *, resumed: bool = False) -> dict[str, str]:
    """Check what a run will need: folders, model, prompts, storage, tracking. Makes what is absent and may be made. A
    `resumed` run needs no tracking server: its points wait. Returns the digests of its prompts.

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
        TimeModel(config.emulation)  # raises ConfigError for a model that does not fit
    _check_address(config.launch.address)
    if config.launch.accelerator == "cuda" and not config.remote_roles:  # else each machine has a share of them
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
        from areal_core.tracking.mlflow_client import check_reachable  # seconds of imports

        check_reachable(uri)
    return digests(source)


def _check_address(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(f"launch.address: this machine can't listen on {address}: {error.strerror}") from error


@contextmanager
def _model_path(where: str = "") -> Iterator[None]:
    """Within, the error of a model names the field, and `where`."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"model.path: {where}{error}") from error


def _check_model(folder: Path, config: RunConfig, log: Log) -> PromptSource:
    """A model folder must be whole and fit the task: its shape, the headers of its weights, tokenizer and prompts."""
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
        raise ModelError(f"model.path: {folder} names no eos_token_id, so that no completion would ever end")
    for token in set[int]().union(*ends) - set(spec.eos_token_ids):
        text = tokenizer.decode([token], special=True)
        log(f"task.chat: completions also end on {text!r}, as turns of the chat template do; eos_token_id lacks it")
    trained_shapes(spec, config.training.lora.adapter)  # its targets
    if spec.transformers is not None:
        _check_engines(config, folder, spec.transformers.why)
    with _model_path(f"{folder}: "):
        return open_source(config, tokenizer, functools.partial(_check_task, log))


def _check_engines(config: RunConfig, folder: Path, why: str) -> None:
    """What only transformers' module trains is served by vLLM, or an engine of the user's."""
    engines = {"generation": (config.generation.engine, config.generation_traits)}
    if config.evaluated:
        engines["evaluation"] = config.evaluation_engine, config.evaluation_traits
    for field, (engine, traits) in engines.items():
        if not traits.any_model:
            wanted = names(GENERATION_ENGINES, "own_server")
            raise ConfigError(f"{field}.engine: must be {wanted} for {folder}, got {engine!r}, for which {why}")


def _check_task(log: Log, config: RunConfig, tokenizer: Tokenizer, source: PromptSource) -> None:
    """Prompts, environment and verifier must be there and go with the tokenizer. Raises UserCodeError for a verifier
    that fails on the first prompt."""
    open_environment(config, tokenizer)
    held_out = source.held_out()
    if first := ([source.prompt(0)] if config.task.trains else held_out[:1]):
        _try_verifier(config, first[0], log)


def _try_verifier(config: RunConfig, task: Prompt, log: Log) -> None:
    """Have the verifier judge the gold answer of a prompt, in a process of its own: a bug is found where it costs
    nothing. Raises UserCodeError with the traceback, the prompt and the completion where it raises, returns no score
    from 0 to 1, hangs or dies."""
    try:
        found = outcome_apart(config, "", task, task.answer)
    except (VerifierError, RewardTimeoutError) as error:
        raise UserCodeError(str(error)) from None
    except RewardError as error:
        log(f"{config.environment.judged_by} has no result for the gold answer of the first prompt: {error}")
        return
    if found.failure is not None:
        raise UserCodeError(found.failure)


def device_memory(config: RunConfig) -> float:
    """Bytes of the smallest GPU that the run may use: launch.device_memory_gib, else what nvidia-smi says. Raises
    ConfigError when it can't be run."""
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
