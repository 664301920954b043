"""A model folder that is sound and as small as can be."""

from __future__ import annotations

from pathlib import Path

from areal_core.models.folders import ModelSpec, init_weights, write_model
from areal_core.models.tokenizer import EOS, char_tokenizer

SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=char_tokenizer().vocab_size,
    hidden_size=8,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    rope_theta=10000.0,
    rms_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=False,
    context=160,
    eos_token_ids=(char_tokenizer().token_id(EOS),),
)


def write_tiny(folder: Path, spec: ModelSpec = SPEC) -> Path:
    """A folder that runs of the embedded task can start from."""
    folder.mkdir(parents=True, exist_ok=True)
    char_tokenizer().save(folder / "tokenizer.json")
    write_model(folder, spec, init_weights(spec, seed=0), folder / "tokenizer.json")
    return folder
