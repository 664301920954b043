"""What the device that trains can do, and how much of its memory was ever in use."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from areal_core.training import flops

_SIDE, _TRIES = 1024, 5  # of the matrices of a core's product, and how often it is timed


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """Of matrix products: a GPU's by its data sheet, None for one that is unknown; a core's as one large product in
    this process reaches it, which takes a fraction of a second. A core without instructions for `dtype` multiplies in
    float32 what it can, so float32 counts as well."""
    if device.type == "cuda":
        return flops.peak_flops_per_s(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."))
    return max(_product_flops_per_s(each) for each in {dtype, torch.float32})


def _product_flops_per_s(dtype: torch.dtype) -> float:
    left, right = torch.rand(2, _SIDE, _SIDE).to(dtype)
    taken_s = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        torch.mm(left, right)
        taken_s.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(taken_s)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process ever used: of a GPU's memory, what torch had allocated since its start or
    `torch.cuda.reset_peak_memory_stats`; on a core, resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().split("\n")
    [line] = [line for line in status if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])
