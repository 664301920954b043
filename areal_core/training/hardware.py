"""Peak FLOPs and peak memory of the training device."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

from areal_core.planning.time_model import ACCELERATORS, Accelerator

_SIDE = 1024  # of the matrices whose product is timed on a CPU core
_TRIES, _ENOUGH_S = 5, 0.5  # how often it is timed; no further once so long was spent


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of matrix products: of a GPU by its data sheet (float32: without TF32; bfloat16: dense), None for one that
    is unknown; of a CPU core as one large product in this process reaches it.

    A core without instructions for `dtype` takes a hundred times as long for that product as in float32, and less for
    others, so float32 counts as well."""
    if device.type == "cuda":
        found = data_sheet(torch.cuda.get_device_name(device))
        return found and 1e12 * {torch.bfloat16: found.tflops, torch.float32: found.float32_tflops}[dtype]
    return max(_product_flops_per_s(each) for each in {dtype, torch.float32})


def data_sheet(name: str) -> Accelerator | None:
    """The data sheet of a GPU, by the name that its driver gives it ("NVIDIA H100 80GB HBM3"). None for one that is not
    listed. Other forms of a listed chip (PCIe, NVL) and slices of it (MIG) have other peaks and count as not listed."""
    words = re.split(r"[\s-]+", name.lower())
    found = [ACCELERATORS[word] for word in words if word in ACCELERATORS]
    return found[0] if found and not {"pcie", "nvl", "mig"} & set(words) else None


def _product_flops_per_s(dtype: torch.dtype) -> float:
    left, right = torch.rand(2, _SIDE, _SIDE, generator=torch.Generator()).to(dtype)
    taken_s: list[float] = []
    while len(taken_s) < _TRIES and sum(taken_s) < _ENOUGH_S:
        start = time.perf_counter()
        torch.mm(left, right)
        taken_s.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(taken_s)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process ever used: of a GPU, what torch had allocated since its start or
    `torch.cuda.reset_peak_memory_stats`; on a CPU, resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().split("\n")
    [line] = [line for line in status if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])
