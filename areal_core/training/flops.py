"""Model FLOPs of training and the peak of the device: the two sides of FLOPs utilisation (MFU).

Model FLOPs are those of PaLM (Chowdhery et al., 2022, arXiv 2204.02311, appendix B). They follow from the shapes of
model and batch: two for each weight that multiplies an input, four for each element of a query head and each input that
it attends to. The backward pass costs twice as much again. Recomputation to save memory does not count. Unlike in PaLM,
attention is causal and logits are computed for completion tokens only.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from areal_core.models.spec import ModelSpec, weight_shapes
from areal_core.planning.time_model import ACCELERATORS, Accelerator, ModelCost
from areal_core.training.engines.engine import TrainingBatch

_SIDE = 1024  # width of the matrices whose product is timed on a CPU core
_TRIES, _ENOUGH_S = 5, 0.5  # timings at most; none further after so many seconds


def step_flops(spec: ModelSpec, batch: TrainingBatch, *, proximal: bool, reference: bool, frozen: bool = False) -> int:
    """Model FLOPs of one step over one rank's share, without sequences that have no gradient.

    They cover the forward and backward passes, a forward pass for pi_prox without the first minibatch, and one for a
    reference policy. `frozen` model weights have no gradient, which saves half of the backward pass of their products.
    FLOPs of an adapter don't count.
    """
    has_gradient, rates, shared = batch.has_gradient, Rates.of(spec), batch.prompts is not None

    def forward(members: Iterable[int], *, attention: bool = True) -> int:
        groups: dict[int, list[int]] = {}
        for index in members:
            if has_gradient[index]:
                groups.setdefault(index if batch.prompts is None else int(batch.prompts[index]), []).append(index)
        total = 0
        for group in groups.values():
            prompt = int(batch.prompt_lengths[group[0]])
            completions = (batch.lengths[group] - prompt).tolist()
            total += forward_flops(rates, prompt, completions, shared=shared, attention=attention)
        return total

    everything = sum(map(forward, batch.minibatches))
    recomputed = sum(map(forward, batch.minibatches[1:])) if proximal else 0
    without = sum(forward(members, attention=False) for members in batch.minibatches) if frozen else 0
    return 3 * everything - without + recomputed + (everything if reference else 0)


class Rates(NamedTuple):
    """FLOPs of a model's forward pass."""

    layers: float  # per input
    attention: float  # per pair of an input and an input that it attends to
    head: float  # per token with logits

    @classmethod
    def of(cls, spec: ModelSpec) -> Rates:
        cost, head = ModelCost(spec), 2.0 * spec.vocab_size * spec.hidden_size
        return cls(
            cost.flops_per_token - head if spec.transformers is None else _matrices(spec), cost.attention_flops, head
        )


def forward_flops(
    rates: Rates, prompt: int, completions: Sequence[int], *, shared: bool, attention: bool = True
) -> int:
    """Model FLOPs of a forward pass over completions of one prompt.

    `prompt` and `completions` are lengths in tokens. With `shared` the prompt is computed once for all completions.
    Without `attention` only products with model weights count.

    Logits are computed for completion tokens only. The last token of a completion is a target, never an input. An input
    attends to itself and to earlier inputs.
    """
    own = [length - 1 for length in completions]
    prompts = 1 if shared else len(completions)
    inputs = prompts * prompt + sum(own)
    attended = prompts * prompt * (prompt + 1) / 2 + sum(count * prompt + count * (count + 1) / 2 for count in own)
    layers = inputs * rates.layers + (attended * rates.attention if attention else 0.0)
    return round(layers + sum(completions) * rates.head)


def training_cost(
    spec: ModelSpec, prompt: int, completions: Sequence[int], *, shared: bool
) -> tuple[float, list[float]]:
    """FLOPs of forward and backward passes over a prompt and over each of its completions.

    Completions are partitioned over ranks by this cost, because long ones cost more per token. Arguments as of
    `forward_flops`.
    """
    rates = Rates.of(spec)
    once = forward_flops(rates, prompt, [], shared=True) if shared else 0
    own = [forward_flops(rates, prompt, [length], shared=shared) - once for length in completions]
    return 3.0 * once, [3.0 * flops for flops in own]


def _matrices(spec: ModelSpec) -> float:
    """FLOPs per input of a model's matrices, from its tensors.

    Matrices with a side as long as the vocabulary are left out: embeddings and output head.
    """
    shapes = [shape for shape in weight_shapes(spec).values() if len(shape) == 2 and spec.vocab_size not in shape]
    return 2.0 * sum(map(math.prod, shapes))


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of matrix products: of a GPU from its data sheet, of a CPU core measured.

    GPU figures are float32 without TF32 and dense bfloat16; None for an unknown GPU. On a CPU, float32 counts too: a
    core without instructions for `dtype` may take a hundred times as long in `dtype`.
    """
    if device.type == "cuda":
        found = data_sheet(torch.cuda.get_device_name(device))
        return found and 1e12 * {torch.bfloat16: found.tflops, torch.float32: found.float32_tflops}[dtype]
    return max(_product_flops_per_s(each) for each in {dtype, torch.float32})


def data_sheet(name: str) -> Accelerator | None:
    """Return a GPU's data sheet by the driver's name for it ("NVIDIA H100 80GB HBM3"), or None.

    Other forms of a listed chip (PCIe, NVL) and slices of it (MIG) have other peaks, so they count as not listed.
    """
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
    """Return the most memory that this process ever used.

    On a GPU it is torch's allocations since the start or since `torch.cuda.reset_peak_memory_stats`. On a CPU it is
    resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().split("\n")
    [line] = [line for line in status if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])
