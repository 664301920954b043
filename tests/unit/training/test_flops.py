"""Model FLOPs of a batch, by hand and against what torch counts of the real passes, and peaks of devices."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_core.models.spec import ModelSpec
from areal_core.training import flops
from areal_core.training.batching.packing import Packed, pack, pack_shared
from areal_core.training.flops import Rates, forward_flops, peak_flops_per_s, step_flops, training_cost
from areal_core.training.model.forward import completion_logprobs
from tests.support.training import SPEC, batch, weights

LENGTHS, PROMPTS = [4, 7, 4, 12], [1, 3, 2, 5]
# Every input attends to itself and to those before it: as whole sequences, and as two groups of two whose prompts of 3
# and 5 tokens are shared.
ATTENDED = 3 * 4 / 2 + 6 * 7 / 2 + 3 * 4 / 2 + 11 * 12 / 2
PAIRED = [(3, [4, 2]), (5, [7, 1])]
PAIRED_ATTENDED = (1 + 2 + 3) + (4 + 5 + 6) + 4 + (1 + 2 + 3 + 4 + 5) + (6 + 7 + 8 + 9 + 10 + 11)
UNTIED = replace(SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False, kv_heads=4, head_dim=8)


def counted(spec: ModelSpec, packed: Packed) -> tuple[float, float]:
    """What torch counts of the products with weights, forward and backward; attention is not among them."""
    leaves = {name: tensor.requires_grad_() for name, tensor in weights(spec).items()}

    def products(counter: FlopCounterMode) -> float:
        return float(
            sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
        )

    with FlopCounterMode(display=False) as forward:
        logprobs, _ = completion_logprobs(spec, leaves, packed)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    return products(forward), products(backward)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spec", [SPEC, UNTIED], ids=lambda spec: spec.architecture)
def test_products_are_those_that_torch_counts(spec: ModelSpec, shared: bool) -> None:
    groups = PAIRED if shared else [(p, [length - p]) for p, length in zip(PROMPTS, LENGTHS, strict=True)]
    prompts = np.array([prompt for prompt, completions in groups for _ in completions])
    lengths = prompts + np.array([completion for _, completions in groups for completion in completions])
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, lengths.sum()).astype(np.int32)
    laid = tokens, lengths, prompts
    forward, backward = counted(spec, pack_shared(*laid, [[0, 1], [2, 3]]) if shared else pack(*laid, range(4)))
    attention = 4 * spec.layers * spec.heads * spec.head_dim * (PAIRED_ATTENDED if shared else ATTENDED)
    passes = [forward_flops(Rates.of(spec), *group, shared=shared) for group in groups]
    costs = [training_cost(spec, *group, shared=shared) for group in groups]
    assert sum(passes) - attention == forward
    # The backward pass makes the logits again, which torch counts and model FLOPs don't, and adds a product of the same
    # size to the head's gradient in place, which model FLOPs count and torch doesn't.
    assert sum(prompt + sum(completions) for prompt, completions in costs) - 3 * attention == forward + backward


def test_a_step_is_its_passes() -> None:
    """A third of the completions have no gradient; pi_prox is recomputed of the second minibatch alone."""
    share = batch()
    share = replace(share, advantages=np.where(np.repeat(np.arange(20) % 3 == 0, share.lengths), 0, share.advantages))

    def passes(minibatch: int, *, attention: bool = True) -> int:
        trained = [index for index in share.minibatches[minibatch] if share.has_gradient[index]]
        cut = [(int(share.prompt_lengths[index]), int(share.lengths[index])) for index in trained]
        return sum(forward_flops(Rates.of(SPEC), p, [n - p], shared=False, attention=attention) for p, n in cut)

    first, second = passes(0), passes(1)
    assert first > 0 < second
    assert step_flops(SPEC, share, proximal=False, reference=False) == 3 * (first + second)
    assert step_flops(SPEC, share, proximal=True, reference=False) == 3 * (first + second) + second
    assert step_flops(SPEC, share, proximal=True, reference=True) == 4 * (first + second) + second
    products = passes(0, attention=False) + passes(1, attention=False)  # whose weights, frozen, have no gradient
    frozen = step_flops(SPEC, share, proximal=False, reference=False, frozen=True)
    assert frozen == 3 * (first + second) - products
    shared = replace(batch(share_prompts=True), advantages=share.advantages)
    assert frozen / 3 < step_flops(SPEC, shared, proximal=False, reference=False) < 3 * (first + second)


CORE, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_core_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < (peak_flops_per_s(CORE, torch.float32) or 0) < 1e14
    speeds = {torch.float32: 2e9, torch.bfloat16: 1e9, torch.float16: 3e9}
    monkeypatch.setattr(flops, "_product_flops_per_s", speeds.__getitem__)
    # A core without bfloat16 multiplies in float32 instead.
    assert {dtype: peak_flops_per_s(CORE, dtype) for dtype in speeds} == speeds | {torch.bfloat16: 2e9}


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA A100-SXM4-80GB", (312e12, 19.5e12)),
        ("NVIDIA H100 80GB HBM3", (989e12, 67e12)),
        ("NVIDIA H100 PCIe", (None, None)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (None, None)),
    ],
)
def test_a_gpu_is_looked_up_by_the_drivers_name(
    name: str, peaks: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert (peak_flops_per_s(GPU, torch.bfloat16), peak_flops_per_s(GPU, torch.float32)) == peaks
