from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.model import ModelSpec
from areal_core.training import packed as packed_module
from areal_core.training.packed import answer_logprobs, pack
from tests.support.training import SPEC, weights

LLAMA = replace(SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False, kv_heads=4, head_dim=8)
# Three sequences of 4, 7 and 4 tokens with prompts of 1, 3 and 2.
LENGTHS, PROMPTS = np.array([4, 7, 4]), np.array([1, 3, 2])
TOKENS = np.random.default_rng(0).integers(0, SPEC.vocab_size, 15).astype(np.int32)


def reference(spec: ModelSpec, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token after the first and entropy of its distribution, from transformers."""
    import transformers

    shape = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": spec.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tie_embeddings,
    }
    family = spec.architecture.removesuffix("ForCausalLM")
    model = getattr(transformers, spec.architecture)(getattr(transformers, f"{family}Config")(**shape)).eval()
    model.load_state_dict(weights(spec), strict=not spec.tie_embeddings)
    model.tie_weights()
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        scores = model(ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0], -(scores.exp() * scores).sum(-1)


@pytest.mark.parametrize("spec", [SPEC, LLAMA], ids=lambda spec: spec.architecture)
def test_forward_agrees_with_transformers(spec: ModelSpec):
    packed = pack(TOKENS, LENGTHS, PROMPTS, [2, 0, 1])
    logprobs, entropy = np.full(15, np.nan), np.full(15, np.nan)
    results = answer_logprobs(spec, weights(spec), packed)
    logprobs[packed.source], entropy[packed.source] = (tensor.numpy() for tensor in results)
    for start, length, prompt in zip([0, 4, 11], LENGTHS, PROMPTS, strict=True):
        expected = reference(spec, TOKENS[start : start + length])
        answer = slice(start + prompt, start + length)
        np.testing.assert_allclose(logprobs[answer], expected[0][prompt - 1 :], atol=1e-5)
        np.testing.assert_allclose(entropy[answer], expected[1][prompt - 1 :], atol=1e-5)
        assert np.isnan(logprobs[start : start + prompt]).all()


def test_pack_layout():
    packed = pack(TOKENS, LENGTHS, PROMPTS, [1, 0, 2])
    assert packed.blocks == ((2, 3), (1, 6))  # sequences 0 and 2, then 1; their last tokens are targets only
    assert packed.inputs.tolist() == [*TOKENS[0:3], *TOKENS[11:14], *TOKENS[4:10]]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert packed.rows.tolist() == [0, 1, 2, 4, 5, 8, 9, 10, 11]
    assert packed.source.tolist() == [1, 2, 3, 13, 14, 7, 8, 9, 10]
    assert packed.targets.tolist() == TOKENS[packed.source].tolist()


def test_gradient_of_the_sliced_head_is_that_of_log_softmax(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_module, "_LOGITS_AT_ONCE", 2 * SPEC.vocab_size)  # two rows at a time, nine in all
    packed = pack(TOKENS, LENGTHS, PROMPTS, [0, 1, 2])
    upstream = torch.randn(len(packed.rows), generator=torch.Generator().manual_seed(0))

    def gradients(sliced: bool) -> tuple[torch.Tensor, ...]:
        leaves = {name: tensor.double().requires_grad_() for name, tensor in weights().items()}
        if sliced:
            logprobs = answer_logprobs(SPEC, leaves, packed)[0]
        else:
            hidden = packed_module.hidden_states(SPEC, leaves, packed)[packed.rows]
            scores = (hidden @ leaves["model.embed_tokens.weight"].T).log_softmax(-1)
            logprobs = scores.gather(-1, packed.targets[:, None])[:, 0]
        return torch.autograd.grad((logprobs * upstream).sum(), list(leaves.values()))

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)


def test_neighbours_in_the_pack_do_not_matter():
    alone = pack(TOKENS, LENGTHS, PROMPTS, [1])
    together = pack(TOKENS, LENGTHS, PROMPTS, [0, 1, 2])
    own = torch.from_numpy(np.isin(together.source, alone.source))
    torch.testing.assert_close(
        answer_logprobs(SPEC, weights(), together)[0][own], answer_logprobs(SPEC, weights(), alone)[0]
    )
