"""`areal doctor`: check this machine's requirements, one per line, and say how to fix each gap.

The exit status is 1 if the default run lacks a requirement. With --model the command describes a model instead: its
architecture, its stop tokens, and a prompt exactly as the model receives it.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

from areal_core.environments.sandbox import Sandbox
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError, ProcessError
from areal_core.models.spec import check_folder
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.folders import model_folder
from flows import cli, stack
from flows.compose import EVALUATION, compose, quoted
from flows.places import WORK

_GIB = 2**30
_MEMORY_GIB = 4  # need of the default run with both servers is about 2.5
_DISK_GIB = 2


@dataclass(frozen=True)
class Finding:
    what: str
    ok: bool
    found: str
    remedy: str = ""  # how to fix it
    needed: bool = True  # False: optional


def findings() -> Iterator[Finding]:
    python = f"Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13) and sys.platform == "linux" and platform.machine() == "x86_64"
    yield Finding("system", fits, python, "must be Python 3.11 to 3.13 on Linux x86-64")
    yield _packages()
    yield from _accelerator()
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", cores >= 2, str(cores), "must be at least 2; with one core, set launch.devices=1")
    memory = psutil.virtual_memory().available / _GIB
    yield Finding("memory", memory >= _MEMORY_GIB, f"{memory:.1f} GiB free", f"must be at least {_MEMORY_GIB} GiB")
    disk = shutil.disk_usage(WORK).free / _GIB
    yield Finding("disk", disk >= _DISK_GIB, f"{disk:.1f} GiB free", f"must be at least {_DISK_GIB} GiB")
    up = stack.running()
    yield Finding("servers", True, f"up: {up.pages}" if up else "down; start them with areal up")
    yield _sandbox()
    packages = (WORK / ".venv-vllm").glob("lib/python*/site-packages/vllm*.dist-info")
    vllm = ", ".join(sorted(folder.stem for folder in packages))
    remedy = "experiment=cpu-vllm needs it; install it with areal setup vllm"
    yield Finding("vLLM environment", bool(vllm), vllm or "none", remedy, needed=False)


def _packages() -> Finding:
    """Check the dependencies of all installed packages."""
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    found = checked.stdout.strip().replace("\n", "; ")
    return Finding("packages", checked.returncode == 0, found, "delete .venv and run make")


def _accelerator() -> Iterator[Finding]:
    """Ask another process about torch and GPUs: importing torch takes a second and some GPU memory."""
    question = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=120)
    if asked.returncode:
        reason = asked.stderr.strip().splitlines()[-1:]
        yield Finding("torch build", False, " ".join(reason), "delete .venv and run make")
        return
    version, cuda, devices = asked.stdout.split()
    yield Finding("torch build", True, f"{version}, {'no CUDA' if cuda == 'None' else f'CUDA {cuda}'}")
    yield Finding("GPU", devices != "0", devices, "the default run needs no GPU", needed=False)


def _sandbox() -> Finding:
    """Run a program in the sandbox: bubblewrap may be installed but lack permissions."""
    found, remedy = "bubblewrap", "environment.verifier=code needs bubblewrap; install it with areal setup sandbox"
    try:
        Sandbox("bubblewrap", memory_mib=256, processes=4).check()
    except ConfigError as error:
        found = str(error).removeprefix("environment.sandbox: ").partition("; ")[0]
    return Finding("sandbox", found == "bubblewrap", found, remedy, needed=False)


def _of_model(path: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Facts about a model, as pairs of name and value. Raises ConfigError, ModelError."""
    config = compose(EVALUATION, [f"model.path={quoted(path)}", *overrides])
    folder = model_folder(config, print)
    spec, tokenizer = check_folder(folder), Tokenizer.from_folder(folder)
    yield "folder", str(folder)
    yield "architecture", f"{spec.architecture}, {spec.parameters / 1e6:,.1f}M parameters, context {spec.context:,}"
    if spec.transformers is not None:
        yield "runs with", f"vLLM for generation and the module of transformers for training: {spec.transformers.why}"
    ends = (f"{token} {tokenizer.decode([token], special=True)!r}" for token in spec.eos_token_ids)
    yield "stop tokens", ", ".join(ends) or "none: every completion would be truncated"
    yield "chat template", "yes" if tokenizer.chat else "none"
    for enabled in (False, True) if tokenizer.chat else (False,):
        chat = replace(config.task.chat, enabled=enabled)
        prompt = open_source(replace(config, task=replace(config.task, chat=chat, held_out=1)), tokenizer).held_out()[0]
        fed = tokenizer.decode(prompt.token_ids, special=True)
        yield f"prompt, task.chat.enabled={str(enabled).lower()}", f"{len(prompt.token_ids)} tokens\n{fed}"


def main(arguments: Sequence[str]) -> None:
    parser = cli.parser("doctor", "", "--model models/Qwen2.5-0.5B task=gsm8k")
    parser.add_argument("--model", help="model folder, GGUF file or run to describe instead of the machine")
    cli.add_settings(parser, " of the shown prompt")
    options = parser.parse_intermixed_args(arguments)
    if options.model is not None:
        for what, found in _of_model(options.model, options.settings):
            print(f"{what:32} {found}")
        return
    print(f"{socket.gethostname()}: {platform.platform()}")
    missing: list[str] = []
    for finding in findings():
        word = "ok" if finding.ok else "missing" if finding.needed else "without"
        missing += [finding.what] if word == "missing" else []
        print(f"{word:8} {finding.what:20} {finding.found}{'' if finding.ok else f'  ({finding.remedy})'}")
    if missing:
        raise ProcessError(f"this machine lacks {', '.join(missing)}; the default run needs them")
