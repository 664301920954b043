"""The reference of the tests of generation: transformers' log-probabilities of the engine's completions.

It computes in float64, but for norms and rotary angles, which transformers always takes in float32. What rounding may
do differs from text to text and from machine to machine: transformers' own float32 shows how much it did.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_core.models import folders
from areal_core.models.folders import ModelSpec
from areal_core.types import Completion, GenerationRequest

QWEN2 = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=23,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=8,
    intermediate_size=48,
    rope_theta=10000.0,
    rms_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    context=96,
    eos_token_ids=(1,),
)
QWEN2_GQA = dataclasses.replace(QWEN2, kv_heads=2)
LLAMA_GQA = dataclasses.replace(
    QWEN2, architecture="LlamaForCausalLM", kv_heads=2, qkv_bias=False, tie_embeddings=False, rope_theta=5e5
)
# Heads of two vectors, the second half full, wider together than the hidden state; an epsilon that can be seen.
QWEN3 = dataclasses.replace(LLAMA_GQA, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=24, rms_eps=1e-2)
ROUNDING = 10  # times the effect of rounding in transformers is allowed here, where sums have another order
NOISE = 1e-5  # nats: allowed at least, where transformers' rounding happens to cancel out
SPECS = {"qwen2": QWEN2, "qwen2-gqa": QWEN2_GQA, "llama-gqa": LLAMA_GQA, "qwen3": QWEN3}


def weights(spec: ModelSpec, seed: int, scale: float = 0.25) -> dict[str, torch.Tensor]:
    """Weights far from uniform predictions, biases included, so that a mistake shows."""
    generator = torch.Generator().manual_seed(seed)
    fresh = folders.init_weights(spec, seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in fresh.items()}


def write(folder: Path, spec: ModelSpec, seed: int) -> Path:
    folders.write_model(folder, spec, weights(spec, seed), None)
    return folder


def by_transformers(folder: str | Path, **options: Any) -> Any:
    """What transformers makes of a model folder. Its import takes seconds, hence not at the top."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


class Reference:
    """Log-probabilities under several versions of one model, by transformers."""

    def __init__(self, scratch: Path, spec: ModelSpec, seeds: dict[int, int]) -> None:
        """`seeds`: version -> seed of its weights."""
        self._rounded, self._exact = {}, {}
        for version, seed in seeds.items():
            model = by_transformers(write(scratch / f"v{version}", spec, seed))
            self._rounded[version], self._exact[version] = model, copy.deepcopy(model).double()

    def logits(self, version: int, token_ids: Sequence[int]) -> torch.Tensor:
        """[L, vocabulary] in float64"""
        return _logits(self._exact[version], token_ids)

    def check(self, request: GenerationRequest, completion: Completion, *, noise: float = NOISE) -> None:
        """Every token's log-probability is that of the version that it names, over the whole text before it."""
        expected, allowed = self.logprobs(request, completion, noise=noise)
        np.testing.assert_allclose(completion.logprobs, expected, atol=allowed, rtol=0)

    def logprobs(
        self, request: GenerationRequest, completion: Completion, *, noise: float = NOISE
    ) -> tuple[np.ndarray, float]:
        """[L] what the completion's log-probabilities should be, and the deviation that rounding allows, in nats."""
        found = [np.full(len(completion.token_ids), np.nan) for _ in range(2)]
        for version in np.unique(completion.versions).tolist():
            of_version = completion.versions == version
            for model, logprobs in zip((self._exact[version], self._rounded[version]), found, strict=True):
                logprobs[of_version] = _logprobs(model, request, completion)[of_version]
        exact, rounded = found
        tempered = noise if request.greedy else noise / min(request.temperature, 1.0)
        return exact, tempered + ROUNDING * float(np.abs(rounded - exact).max(initial=0.0))


@torch.inference_mode()
def _logits(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(token_ids)])).logits[0].double()


def _logprobs(model: torch.nn.Module, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """[L] at the temperature of the request."""
    logits = _logits(model, [*request.token_ids, *completion.token_ids.tolist()])[len(request.token_ids) - 1 : -1]
    logprobs = (logits / (1.0 if request.greedy else request.temperature)).log_softmax(-1)
    return logprobs[np.arange(len(logits)), completion.token_ids].numpy()


def request(request_id: str = "r", prompt: Sequence[int] = (2, 3, 4), **changes) -> GenerationRequest:
    fields = {"n": 1, "max_tokens": 24, "seed": 7, "stop_token_ids": (1,)} | changes
    return GenerationRequest(request_id=request_id, token_ids=tuple(prompt), **fields)
