"""Tiny models of architectures that transformers' own modules run, as folders that transformers has written."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_core.models.spec import ModelSpec, TransformersModel, weight_shapes, write_config
from areal_core.models.tokenizer import EOS, char_tokenizer

TOKENIZER = char_tokenizer()
_SIZE = {
    "vocab_size": TOKENIZER.vocab_size,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32, as vLLM needs them on a CPU
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 160,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # what each has that this package's own passes lack
    "olmo2": ("olmo2", _SIZE),  # norms after the layers
    "gemma2": ("gemma2", _SIZE | {"head_dim": 32, "sliding_window": 8, "final_logit_softcapping": 2.0}),
    "phi3": ("phi3", _SIZE | {"pad_token_id": 0}),  # fused projections
    "gpt2": ("gpt2", {"vocab_size": TOKENIZER.vocab_size, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}),
    "llama-3": (  # rope scaling
        "llama",
        _SIZE
        | {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
}  # fmt: skip


def run_by_transformers(spec: ModelSpec) -> ModelSpec:
    """The same model, but transformers' module runs it."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), spec, "float32")
        config = (Path(folder) / "config.json").read_text()
    tensors = tuple(weight_shapes(spec).items())
    return dataclasses.replace(spec, transformers=TransformersModel(why="it is a test", config=config, tensors=tensors))


def write_transformers_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A folder that runs of the embedded task can start from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, fields = KINDS[kind]
    torch.manual_seed(seed)
    eos = TOKENIZER.token_id(EOS)
    config = AutoConfig.for_model(name, **fields, eos_token_id=eos, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))  # no two tokens alike, biases and norms included
    model.save_pretrained(folder)
    TOKENIZER.save(folder / "tokenizer.json")
    return folder


def scores_of_targets(model: torch.nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Log-probability of each token after the first and entropy of its distribution."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    scores = model(ids).logits[0, :-1].div(temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0], -(scores.exp() * scores).sum(-1)
