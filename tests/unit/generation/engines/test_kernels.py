"""The compiled kernels against plain numpy, torch and each other."""

import dataclasses

import numpy as np
import pytest
import torch
from numba import njit

from areal_core.generation.engines import kernels
from areal_core.generation.engines.decoder import CpuDecoder
from areal_core.generation.engines.slots import Pass
from areal_core.generation.engines.torch_decoder import TorchDecoder
from areal_core.models import vectors
from tests.support.generation import LLAMA_GQA, QWEN2, QWEN2_GQA, QWEN3, weights

SHAPES = {
    "qwen2": QWEN2,
    "qwen2-gqa": QWEN2_GQA,
    "llama-untied": LLAMA_GQA,
    "nothing-divides": dataclasses.replace(
        LLAMA_GQA, hidden_size=70, heads=5, kv_heads=1, head_dim=18, intermediate_size=37, vocab_size=131
    ),
    "qwen3": QWEN3,
    "wide": dataclasses.replace(QWEN2, hidden_size=192, heads=6, kv_heads=2, head_dim=64, intermediate_size=320),
}


def exp(x):
    out = vectors.zeros(len(x))
    _exp_all(np.ascontiguousarray(x, dtype=np.float32), out)
    return out


@njit
def _exp_all(x, out):
    for i in range(0, len(x), vectors.LANES):
        vectors.stored(vectors.exp(vectors.loaded(x, i)), out, i)


def test_the_exponential_is_exact_to_two_units_in_the_last_place():
    x = np.linspace(-79.9, 87, 16 * 50_000).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exp(x) / exact - 1).max() < 2 * 2.0**-23
    assert exp(np.array([-80.1, -1000, -np.inf, np.nan] * 4))[:3].tolist() == [0, 0, 0]
    assert np.isnan(exp(np.array([-80.1, -1000, -np.inf, np.nan] * 4))[3])


def rows(tokens, slots, positions, ends, of, temperatures):
    ints = (np.array(array, dtype=np.int32) for array in (tokens, slots, positions, ends, of))
    return Pass(*ints, np.array(temperatures, dtype=np.float32), np.linspace(0, 0.99, len(of)))


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_passes_agree_with_the_decoder_in_torch(spec):
    """Sequences prefilled whole and in parts, among decode steps; several completions that sample from one row."""
    tensors, context = weights(spec, 3), 96
    first, second, third = np.random.default_rng(1).integers(0, spec.vocab_size, (3, context)).astype(np.int32)
    passes = [
        rows([*first[:20], *second[:3]], [2] * 20 + [0] * 3, [*range(20), *range(3)], [19, 22], [0, 0, 1], [1, 0, 2]),
        rows([first[20], *second[3:40]], [2] + [0] * 37, [20, *range(3, 40)], [0], [0], [0.5]),
        rows([first[21], *third[:33], second[40]], [2, *[1] * 33, 0], [21, *range(33), 40], [0, 34], [1, 0], [1, 1]),
    ]
    sampled = []
    for decoder in (CpuDecoder(spec, tensors, context), TorchDecoder(spec, tensors, context, "cpu")):
        cache = decoder.cache(3, 64)
        sampled.append([decoder.run(cache, each) for each in passes])
    for (tokens, logprobs), (expected_tokens, expected) in zip(*sampled, strict=True):
        assert tokens.tolist() == expected_tokens.tolist()
        np.testing.assert_allclose(logprobs, expected, atol=5e-5)  # float32 on both sides, at a temperature of 0.5


def draw(logits, temperatures, uniforms):
    vocab = logits.shape[1]
    width = vectors.round_up(vocab, kernels.COLUMNS)
    padded = np.full((len(logits), width), 99, dtype=np.float32)  # what must not be looked at
    padded[:, :vocab] = logits
    count = len(uniforms)
    tokens, logprobs = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.float32)
    finite = kernels.draw(
        padded.reshape(-1), vocab, width, np.arange(count, dtype=np.int32), count,
        np.array(temperatures, dtype=np.float32), np.array(uniforms), tokens, logprobs,
    )  # fmt: skip
    return (tokens, logprobs) if finite else None


@pytest.mark.parametrize("vocab", [2, 16, 23, 1000])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 7.0])
def test_a_draw_inverts_the_distribution(vocab, temperature):
    random = np.random.default_rng(vocab)
    logits = random.normal(scale=3, size=(500, vocab)).astype(np.float32)
    uniforms = random.uniform(size=500)
    tokens, logprobs = draw(logits, [temperature] * 500, uniforms)
    exact = torch.from_numpy(logits.astype(np.float64) / temperature).log_softmax(-1).numpy()
    cumulative = np.exp(exact).cumsum(-1)
    chosen = np.arange(500), tokens
    assert (uniforms < cumulative[chosen] + 1e-6).all()
    assert (uniforms > cumulative[chosen] - np.exp(exact[chosen]) - 1e-6).all()
    rounding = float(np.finfo(np.float32).eps)  # of a logit, a few times
    np.testing.assert_allclose(logprobs, exact[chosen], atol=4 * rounding * np.abs(logits).max() / temperature)


def test_a_draw_takes_the_first_and_the_last_token_that_can_be_sampled():
    logits = np.array([[-1e9, 0, 0, -1e9]] * 2, dtype=np.float32)
    tokens, logprobs = draw(logits, [1, 1], [0.0, 1 - 2.0**-52])
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs, np.log(0.5))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 22])
def test_a_draw_refuses_logits_that_are_not_finite(number, place):
    logits = np.zeros((1, 23), dtype=np.float32)
    logits[0, place] = number
    assert draw(logits, [1.0], [0.5]) is None
    assert draw(logits, [0.0], [0.5]) is None


def test_unused_slots_take_no_memory():
    """24 layers and 128 slots of 2048 tokens are reserved; short sequences touch few of them."""
    spec = dataclasses.replace(LLAMA_GQA, layers=24, head_dim=64, context=2048)
    decoder = CpuDecoder(spec, weights(spec, 1), 2048)
    before = resident()
    cache = decoder.cache(128, 2048)
    assert cache.flat.nbytes == 24 * 128 * 2 * 2048 * 2 * 64 * 4  # 3.2 GB
    decoder.run(cache, rows([2] * 40, range(40), [0] * 40, range(40), range(40), [1] * 40))
    assert resident() - before < 100 * 2**20


def resident():
    """Bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
