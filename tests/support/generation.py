"""What transformers says of the answers that the engine gave: the reference of the tests of generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from areal_core import model
from areal_core.model import ModelSpec
from areal_core.types import GenerationRequest
from areal_core.wire import Answer

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
SPECS = {"qwen2": QWEN2, "qwen2-gqa": QWEN2_GQA, "llama-gqa": LLAMA_GQA}


def weights(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Weights far from uniform predictions, so that a mistake shows."""
    generator = torch.Generator().manual_seed(seed)
    fresh = model.init_weights(spec, seed)
    return {name: tensor + 0.25 * torch.randn(tensor.shape, generator=generator) for name, tensor in fresh.items()}


def write(folder: Path, spec: ModelSpec, seed: int) -> Path:
    model.write_model(folder, spec, weights(spec, seed), None)
    return folder


class Reference:
    """Log-probabilities under several versions of one model, by transformers."""

    def __init__(self, scratch: Path, spec: ModelSpec, seeds: dict[int, int]) -> None:
        """`seeds`: version -> seed of its weights."""
        self._models = {
            version: AutoModelForCausalLM.from_pretrained(write(scratch / f"v{version}", spec, seed)).eval()
            for version, seed in seeds.items()
        }

    @torch.inference_mode()
    def logits(self, version: int, token_ids: Sequence[int]) -> torch.Tensor:
        """[L, vocabulary]"""
        return self._models[version](torch.tensor([list(token_ids)])).logits[0]

    def check(self, request: GenerationRequest, answer: Answer, *, tolerance: float = 2e-5) -> None:
        """Every token's log-probability is that of the version that it names, over the whole text before it."""
        text = [*request.token_ids, *answer.token_ids.tolist()]
        expected = np.empty(len(answer.token_ids), dtype=np.float32)
        for version in np.unique(answer.versions).tolist():
            logits = self.logits(version, text).double() / (1.0 if request.greedy else request.temperature)
            logprobs = logits.log_softmax(-1)[len(request.token_ids) - 1 : -1]
            of_version = answer.versions == version
            chosen = logprobs[np.arange(len(expected)), answer.token_ids].numpy()
            expected[of_version] = chosen[of_version]
        if not request.greedy:
            tolerance /= min(request.temperature, 1.0)
        np.testing.assert_allclose(answer.logprobs, expected, atol=tolerance, rtol=0)


def request(request_id: str = "r", prompt: Sequence[int] = (2, 3, 4), **changes) -> GenerationRequest:
    fields = {"n": 1, "max_tokens": 24, "seed": 7, "stop_token_ids": (1,)} | changes
    return GenerationRequest(request_id=request_id, token_ids=tuple(prompt), **fields)
