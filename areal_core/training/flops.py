"""How much arithmetic training asks of a model, and how much a GPU can do: both sides of model FLOPs utilisation.

Model FLOPs are those of PaLM (Chowdhery et al., 2022, arXiv 2204.02311, appendix B): what the shapes of a model and of
a batch demand, two for each weight that an input is multiplied with and four for each number of a query head and each
input that it attends to; twice as much again for the backward pass. What an implementation computes a second time, for
want of memory, does not count. Unlike there, attention is causal and logits are made for answer tokens alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from areal_core.emulation import ACCELERATORS, ModelShape
from areal_core.spec import ModelSpec
from areal_core.training.engine import TrainingBatch


def step_flops(spec: ModelSpec, batch: TrainingBatch, *, forward_passes: int) -> int:
    """Of one step over one rank's share, but for what has no gradient. `forward_passes`: beside those that are trained
    on, for pi_prox and for a reference policy."""
    chosen = batch.has_gradient
    lengths, prompts = batch.lengths[chosen].tolist(), batch.prompt_lengths[chosen].tolist()
    targets = sum(lengths) - sum(prompts)
    return training_cost(spec, lengths, targets) + forward_passes * forward_flops(spec, lengths, targets)


def forward_flops(spec: ModelSpec, lengths: Sequence[int], targets: int | None = None) -> int:
    """Of a forward pass over sequences of so many tokens, prompt and answer: that of pi_prox, say.

    `targets`: answer tokens, the only ones whose logits are made; None: all but the first of each sequence. The last
    token of a sequence is a target and never an input, and an input attends to itself and to those before it.
    """
    inputs = [length - 1 for length in lengths]
    shape = _shape(spec)
    head = 2.0 * spec.vocab_size * spec.hidden_size
    attended = sum(count * (count + 1) for count in inputs) / 2
    layers = sum(inputs) * (shape.flops_per_token - head) + attended * shape.attention_flops
    return round(layers + (sum(inputs) if targets is None else targets) * head)


def training_cost(spec: ModelSpec, lengths: Sequence[int], targets: int | None = None) -> int:
    """FLOPs of forward and backward passes over the sequences of a batch, or of one group: what ranks share out evenly,
    where long answers cost more than their tokens say."""
    return 3 * forward_flops(spec, lengths, targets)


def peak_flops_per_s(name: str, dtype: str) -> float | None:
    """What the data sheet promises of a GPU, by the name that its driver gives it ("NVIDIA H100 80GB HBM3"), in
    products of `dtype` (float32: without TF32; bfloat16: dense). None for one that the table does not have: other forms
    of the same chip (PCIe, NVL) and slices of it (MIG) have other peaks."""
    words = re.split(r"[\s-]+", name.lower())
    found = [ACCELERATORS[word] for word in words if word in ACCELERATORS]
    if not found or {"pcie", "nvl", "mig"} & set(words):
        return None
    return {"bfloat16": found[0].flops_per_s, "float32": found[0].float32_flops_per_s}[dtype]


def _shape(spec: ModelSpec) -> ModelShape:
    return ModelShape(
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        head_dim=spec.head_dim,
    )
