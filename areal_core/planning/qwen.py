"""Shapes of the Qwen2.5 models, from their public config.json: for plans and emulations, which need no weights."""

from __future__ import annotations

from areal_core.models.spec import ModelSpec


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936 if hidden < 2048 else 152064,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
        rope_theta=1e6,
        rms_eps=1e-6,
        qkv_bias=True,
        tie_embeddings=tied,
        context=32768,
        eos_token_ids=(151643,),
    )


# The 1.5B of the paper is a distilled one, whose output is not tied to its embeddings.
SPECS = {
    "0.5b": _qwen(24, 896, 14, 2, 4864, tied=True),
    "1.5b": _qwen(28, 1536, 12, 2, 8960),
    "1.5b-tied": _qwen(28, 1536, 12, 2, 8960, tied=True),
    "7b": _qwen(28, 3584, 28, 4, 18944),
    "14b": _qwen(48, 5120, 40, 8, 13824),
    "32b": _qwen(64, 5120, 40, 8, 27648),
}
