from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.models.folders import ModelSpec
from areal_core.training.batching.packing import Packed
from areal_core.training.engines.policy_module import PolicyModule
from areal_core.training.model.forward import completion_logprobs
from tests.support.training import QWEN3, SPEC, batch, weights

UNTIED = replace(SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False)


def parameters(spec: ModelSpec = SPEC) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(tensor) for name, tensor in weights(spec).items()}


def packed() -> Packed:
    share = batch()
    return share.cut(range(len(share.lengths)))[0]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spec", [SPEC, UNTIED, QWEN3], ids=["tied", "untied", "qwen3"])
def test_the_module_is_the_forward_pass(spec: ModelSpec, recompute: bool):
    tensors = {name: tensor.requires_grad_() for name, tensor in weights(spec).items()}
    expected = completion_logprobs(spec, tensors, packed(), temperature=0.7)
    expected[0].sum().backward()
    module = PolicyModule(spec, parameters(spec), temperature=0.7, checkpoint_activations=recompute)
    logprobs, entropy = module(packed())
    logprobs.sum().backward()
    torch.testing.assert_close((logprobs, entropy), expected, rtol=0, atol=0)
    for name, parameter in module.named_weights.items():
        assert parameter.grad is not None
        assert (parameter.grad - tensors[name].grad).norm() <= 1e-5 * tensors[name].grad.norm()


def test_passes_may_be_less_precise_than_parameters():
    module = PolicyModule(SPEC, parameters(), dtype=torch.bfloat16)
    logprobs, _ = module(packed())
    logprobs.float().sum().backward()
    table = module.named_weights["model.embed_tokens.weight"]
    assert table.dtype == torch.float32
    assert table.grad is not None
    assert table.grad.dtype == torch.float32
    exact, _ = completion_logprobs(SPEC, weights(), packed())
    error = np.abs(logprobs.detach().float().numpy() - exact.numpy()).max()
    assert 0 < error < 0.2  # logits of some units, with 8 bits
