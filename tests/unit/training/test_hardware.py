from __future__ import annotations

import pytest
import torch

from areal_core.training import hardware
from areal_core.training.hardware import peak_flops_per_s

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
