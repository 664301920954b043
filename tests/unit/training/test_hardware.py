from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from areal_core.training import hardware
from areal_core.training.hardware import peak_flops_per_s, peak_memory_bytes

CORE = torch.device("cpu")


def test_a_core_is_measured_and_a_gpu_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < (peak_flops_per_s(CORE, torch.float32) or 0) < 1e14
    speeds = {torch.float32: 2e9, torch.bfloat16: 1e9, torch.float16: 3e9}
    monkeypatch.setattr(hardware, "_product_flops_per_s", speeds.__getitem__)
    # A core without bfloat16 multiplies in float32 instead.
    assert {dtype: peak_flops_per_s(CORE, dtype) for dtype in speeds} == speeds | {torch.bfloat16: 2e9}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops_per_s(torch.device("cuda"), torch.bfloat16) == 989e12
    assert peak_flops_per_s(torch.device("cuda"), torch.float32) == 67e12


@pytest.mark.nightly
def test_peak_memory_is_the_processes_own() -> None:
    """In a process of its own: what it once held counts after it is gone, and what its parent held does not."""
    program = """
import torch
from areal_core.training import hardware
from areal_core.training.hardware import peak_memory_bytes
core = torch.device("cpu")
before = peak_memory_bytes(core)
held = torch.ones(64 << 20)
del held
print(before, peak_memory_bytes(core))
"""
    ours = torch.ones(256 << 20)
    assert peak_memory_bytes(CORE) > ours.numel() * 4
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, told.stdout.split())
    assert before < ours.numel() * 4
    assert after - before > 250 << 20
