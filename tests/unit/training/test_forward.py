"""The forward pass against transformers, with shared prompts, in bfloat16, and as a module."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.models.folders import ModelSpec, weight_shapes
from areal_core.training.batching.packing import Packed, pack, pack_shared
from areal_core.training.model import forward, operations
from areal_core.training.model.forward import completion_logprobs
from tests.support.training import QWEN3, SPEC, weights
from tests.support.transformers_models import scores_of_targets

LLAMA = replace(SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False, kv_heads=4, head_dim=8)
SPECS = [SPEC, LLAMA, QWEN3]
# Three sequences of 4, 7 and 4 tokens with prompts of 1, 3 and 2.
LENGTHS, PROMPTS = np.array([4, 7, 4]), np.array([1, 3, 2])
TOKENS = np.random.default_rng(0).integers(0, SPEC.vocab_size, 15).astype(np.int32)


def by_transformers(spec: ModelSpec) -> torch.nn.Module:
    """In float64, but for norms and angles, which are float32 all the same."""
    import transformers

    family = spec.architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size, rms_norm_eps=spec.rms_eps, max_position_embeddings=spec.context,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tie_embeddings,
    )  # fmt: skip
    model = getattr(transformers, spec.architecture)(config).eval()
    model.load_state_dict(weights(spec), strict=not spec.tie_embeddings)
    model.tie_weights()
    return model.double()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.architecture)
def test_forward_agrees_with_transformers(spec: ModelSpec, temperature: float):
    packed = pack(TOKENS, LENGTHS, PROMPTS, [2, 0, 1])
    logprobs, entropy = np.full(15, np.nan), np.full(15, np.nan)
    exact = {name: tensor.double() for name, tensor in weights(spec).items()}
    results = completion_logprobs(spec, exact, packed, temperature=temperature)
    model = by_transformers(spec).requires_grad_(False)
    logprobs[packed.source], entropy[packed.source] = (tensor.numpy() for tensor in results)
    for start, length, prompt in zip([0, 4, 11], LENGTHS, PROMPTS, strict=True):
        expected = scores_of_targets(model, TOKENS[start : start + length], temperature)
        completion = slice(start + prompt, start + length)
        np.testing.assert_allclose(logprobs[completion], expected[0][prompt - 1 :], atol=1e-6)
        np.testing.assert_allclose(entropy[completion], expected[1][prompt - 1 :], atol=1e-6)
        assert np.isnan(logprobs[start : start + prompt]).all()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.architecture)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_agree_with_transformers(spec: ModelSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Of each weight, relative to its norm, in torch's operations and by the compiled kernels; the head, in slices."""
    monkeypatch.setattr(forward, "_LOGITS_AT_ONCE", 2 * spec.vocab_size)  # two rows at a time, nine in all
    model = by_transformers(spec)
    starts = np.cumsum(LENGTHS) - LENGTHS
    for start, length, prompt in zip(starts, LENGTHS, PROMPTS, strict=True):
        logprobs, entropy = scores_of_targets(model, TOKENS[start : start + length])
        (logprobs + 0.3 * entropy)[prompt - 1 :].sum().backward()
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in weights(spec).items()}
    logprobs, entropy = completion_logprobs(spec, leaves, pack(TOKENS, LENGTHS, PROMPTS, [0, 1, 2]))
    (logprobs + 0.3 * entropy).sum().backward()
    expected = dict(model.named_parameters())
    assert expected.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert (leaf.grad.double() - expected[name].grad).norm() <= 1e-5 * expected[name].grad.norm(), name


# Completions of 3, 1 and 3 tokens for a prompt of 1, of 5, 2, 5 and 9 for one of 4, of 1 and 1 for one of 7.
GROUPS = [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
SHARED_PROMPTS = np.array([1, 1, 1, 4, 4, 4, 4, 7, 7])
SHARED_LENGTHS = SHARED_PROMPTS + np.array([3, 1, 3, 5, 2, 5, 9, 1, 1])


def same_prompts() -> np.ndarray:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, SPEC.vocab_size, SHARED_PROMPTS[members[0]]) for members in GROUPS]
    completions = [rng.integers(0, SPEC.vocab_size, length) for length in SHARED_LENGTHS - SHARED_PROMPTS]
    parts = [(prompt, completions[index]) for prompt, members in zip(prompts, GROUPS, strict=True) for index in members]
    return np.concatenate([part for pair in parts for part in pair]).astype(np.int32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.architecture)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_prompts_that_are_computed_once_change_nothing(spec: ModelSpec, dtype: torch.dtype, tolerance: float):
    """Log-probabilities, entropies, and the gradient of each weight relative to its norm."""
    tokens = same_prompts()
    laid = tokens, SHARED_LENGTHS, SHARED_PROMPTS

    def outcome(packed: Packed) -> tuple[np.ndarray, tuple[torch.Tensor, ...]]:
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in weights(spec).items()}
        made = completion_logprobs(spec, leaves, packed)
        upstream = torch.from_numpy(np.sin(np.stack((packed.source, 2 * packed.source)))).to(dtype)
        values = np.zeros((2, len(tokens)))
        values[:, packed.source] = torch.stack(made).detach().numpy()
        return values, torch.autograd.grad((torch.stack(made) * upstream).sum(), list(leaves.values()))

    values, gradient = outcome(pack(*laid, range(9)))
    shared, shared_gradient = outcome(pack_shared(*laid, GROUPS))
    np.testing.assert_allclose(shared, values, rtol=0, atol=tolerance)
    for one, other in zip(gradient, shared_gradient, strict=True):
        assert (one - other).norm() <= tolerance * one.norm()


def test_the_head_gradient_is_a_sum_in_float32(monkeypatch: pytest.MonkeyPatch):
    """A slice a row: in bfloat16, 1 + 1/256 is 1, and a sum would stand still."""
    rows = 257
    packed = pack(np.zeros(rows + 1, np.int32), np.array([rows + 1]), np.array([1]), [0])
    monkeypatch.setattr(forward, "_LOGITS_AT_ONCE", 2)
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.tensor([[1.0]] + [[1 / 256]] * (rows - 1), dtype=torch.bfloat16)
    logprobs, _ = forward.target_logprobs(head, hidden, packed, temperature=1.0)
    [gradient] = torch.autograd.grad(logprobs.sum(), [head])
    assert gradient[0].item() == 1.0  # (1 + 256 / 256) (1 - 1/2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [False, True])
def test_the_forward_pass_stays_on_the_device(
    kernel: bool, dtype: torch.dtype, recompute: bool, monkeypatch: pytest.MonkeyPatch
):
    """On torch's device without numbers, which refuses those of another as a GPU does: shapes and types alone, through
    torch's own kernel for sequences of any lengths too."""
    monkeypatch.setattr(operations, "has_kernel", lambda query: kernel)
    packed = pack(TOKENS, LENGTHS, PROMPTS, [0, 1, 2])
    leaves = {
        name: torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        for name, shape in weight_shapes(SPEC).items()
    }
    logprobs, entropy = completion_logprobs(SPEC, leaves, packed, temperature=0.7, recompute_layers=recompute)
    assert logprobs.shape == entropy.shape == packed.rows.shape
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.device.type == entropy.device.type == "meta"
    logprobs.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert (leaf.grad.dtype, leaf.grad.device.type) == (dtype, "meta")
