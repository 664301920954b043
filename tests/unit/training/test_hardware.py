from __future__ import annotations

import pytest
import torch

from areal_core.training import hardware
from areal_core.training.hardware import peak_flops_per_s

CORE, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_core_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < (peak_flops_per_s(CORE, torch.float32) or 0) < 1e14
    speeds = {torch.float32: 2e9, torch.bfloat16: 1e9, torch.float16: 3e9}
    monkeypatch.setattr(hardware, "_product_flops_per_s", speeds.__getitem__)
    # A core without bfloat16 multiplies in float32 instead.
    assert {dtype: peak_flops_per_s(CORE, dtype) for dtype in speeds} == speeds | {torch.bfloat16: 2e9}


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA A100-SXM4-80GB", (312e12, 19.5e12)),
        ("NVIDIA H100 80GB HBM3", (989e12, 67e12)),
        *(
            (name, (None, None))
            for name in ("NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        ),
    ],
)
def test_a_gpu_is_looked_up_by_the_drivers_name(
    name: str, peaks: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert (peak_flops_per_s(GPU, torch.bfloat16), peak_flops_per_s(GPU, torch.float32)) == peaks
