"""The GPU check without a GPU: a small run of it on a CPU, and that it notices and reports errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _gpu_parts

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first by the command; the others in this process, which has torch already."""
    monkeypatch.setenv("AREAL_REVISION", "abc")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    command = [sys.executable, "-m", "benchmarks.gpu_first", "--device", "cpu", "--tiny", "--parts", "agree"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    agree = json.loads(done.stdout)
    assert (agree["part"], agree["revision"]) == ("agree", "abc")
    for part in ("train", "decode"):
        monkeypatch.setattr(sys, "argv", ["", part, "--device", "cpu", "--tiny", "--tokens", "65536"])
        with pytest.raises(SystemExit, match="0"):
            _gpu_parts.main()
    train, decode = map(json.loads, capsys.readouterr().out.splitlines())
    for line in (agree, train, decode):
        assert (line["device"], line["torch"]) == ("cpu", torch.__version__)
    checks = agree["checks"]
    assert checks["trainer_bfloat16_mean"]["value"] > checks["embedded_max"]["bound"] > 0
    plain, checkpointed = (train["tiny"][arm] for arm in ("plain", "checkpointed"))
    assert plain["grad_norm"] == checkpointed["grad_norm"] > 0
    assert 0 < plain["mfu"] < 1
    assert {"slots_4", "slots_8", "swap"} < set(decode["tiny"])
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "areal_core.generation.engines.torch_decoder" in imported
    assert not imported & {"areal_core.generation.engines.kernels", "prefect", "mlflow", "deepspeed", "vllm", "hydra"}
