"""What the device that trains can do, and how much of its memory was ever in use."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from areal_core.training import flops

_SIDE = 1024  # of the matrices of a core's product
_TRIES, _ENOUGH_S = 5, 0.5  # how often it is timed, less often where that takes long


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """Of matrix products: a GPU's by its data sheet, None for one that is unknown; a core's as one large product in
    this process reaches it. A core without instructions for `dtype` takes a hundred times as long for that product as
    in float32, and less for others, so float32 counts as well."""
    if device.type == "cuda":
        return flops.peak_flops_per_s(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."))
    return max(_product_flops_per_s(each) for each in {dtype, torch.float32})


def _product_flops_per_s(dtype: torch.dtype) -> float:
    left, right = torch.rand(2, _SIDE, _SIDE).to(dtype)
    taken_s: list[float] = []
    while len(taken_s) < _TRIES and sum(taken_s) < _ENOUGH_S:
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
