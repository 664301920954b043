"""Qwen2 and Llama decoders as data: what a model folder says, its weights by name, and folders written from them.

Generation and training each run these weights in their own way; what they must agree on stands here. Names and shapes
of tensors are those of transformers ("model.layers.0.self_attn.q_proj.weight").
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_core.errors import ModelError

_MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder. Rotary embeddings are the plain ones, the activation is SwiGLU with silu."""

    architecture: str  # Qwen2ForCausalLM or LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_eps: float
    qkv_bias: bool
    tie_embeddings: bool
    context: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...]

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in weight_shapes(self).values())


def read_spec(folder: str | Path) -> ModelSpec:
    """The spec of a folder in the transformers format, from config.json and generation_config.json.

    Raises ModelError naming the folder and the field when the folder is missing or broken, or when the model needs
    what is not supported: another architecture, rope scaling, sliding windows, another activation, other biases.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")

    def field(name: str, default: Any = None) -> Any:
        value = config.get(name)
        if value is None and default is None:
            raise ModelError(f"{folder}: config.json has no {name}")
        return default if value is None else value

    def count(name: str, default: int | None = None) -> int:
        value = field(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{folder}: {name} must be a whole number of at least 1, got {value!r}")
        return value

    architecture = next(iter(config.get("architectures") or ["none"]))
    if architecture not in _MODEL_TYPES:
        raise ModelError(f"{folder}: architectures must name one of {', '.join(_MODEL_TYPES)}, got {architecture!r}")
    if field("hidden_act", "silu") != "silu":
        raise ModelError(f"{folder}: hidden_act must be silu, got {config['hidden_act']!r}")
    for unsupported in ("use_sliding_window", "mlp_bias", "attention_bias"):
        # Qwen2 always has its q, k and v biases, whatever attention_bias says.
        if config.get(unsupported) and not (unsupported == "attention_bias" and architecture == "Qwen2ForCausalLM"):
            raise ModelError(f"{folder}: {unsupported} must be false, got {config[unsupported]!r}")
    heads, hidden_size = count("num_attention_heads"), count("hidden_size")
    kv_heads = count("num_key_value_heads", heads)
    head_dim = count("head_dim", hidden_size // heads)
    if heads % kv_heads:
        raise ModelError(f"{folder}: num_key_value_heads must divide num_attention_heads ({heads}), got {kv_heads}")
    if head_dim % 2:
        raise ModelError(f"{folder}: head_dim must be even, got {head_dim}")
    return ModelSpec(
        architecture=architecture,
        vocab_size=count("vocab_size"),
        hidden_size=hidden_size,
        layers=count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=count("intermediate_size"),
        rope_theta=_rope_theta(folder, config),
        rms_eps=float(field("rms_norm_eps", 1e-6)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        context=count("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in the order of the forward pass; no lm_head.weight when embeddings are tied."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        for name, width in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
            shapes[at + f"self_attn.{name}_proj.weight"] = (width * spec.head_dim, hidden)
            if spec.qkv_bias:
                shapes[at + f"self_attn.{name}_proj.bias"] = (width * spec.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, spec.heads * spec.head_dim)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_weights(spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
    """Raise ModelError naming the first tensor that is missing, surplus or of another shape than the spec's."""
    shapes = weight_shapes(spec)
    for name, shape in shapes.items():
        if name not in weights:
            raise ModelError(f"{name}: tensor is missing, expected shape {list(shape)}")
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"{name}: expected shape {list(shape)}, got {list(weights[name].shape)}")
    for name in weights:
        if name not in shapes:
            raise ModelError(f"{name}: no such tensor in this model")


def read_weights(source: str | Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights of a model folder (one safetensors file or several with an index) or of one safetensors file.

    Raises ModelError naming the file or the tensor when something is missing, damaged or of another shape. Tensors that
    the model does not use (a tied lm_head.weight, say) are not read.
    """
    weights: dict[str, Tensor] = {}
    wanted = weight_shapes(spec)
    for file in _weight_files(Path(source)):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name in wanted:
                        weights[name] = tensors.get_tensor(name).to(dtype)
        except FileNotFoundError:
            raise ModelError(f"{file}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: not a readable safetensors file ({error})") from None
    try:
        check_weights(spec, weights)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    return weights


def write_model(
    folder: str | Path, spec: ModelSpec, weights: Mapping[str, Tensor], tokenizer_file: Path | None
) -> None:
    """Write a complete folder in the transformers format. `tokenizer_file` is a tokenizer.json; a
    tokenizer_config.json beside it is taken along."""
    check_weights(spec, weights)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": None, "eos_token_id": list(spec.eos_token_ids) or None, "pad_token_id": None}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = {
        "architectures": [spec.architecture],
        "model_type": _MODEL_TYPES[spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "silu",
        "rope_theta": spec.rope_theta,  # readers older than transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.context,
        "use_cache": True,
        "dtype": dtype,
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0, **ids})
    save_file(
        {name: weights[name].contiguous() for name in weight_shapes(spec)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    if tokenizer_file is not None:
        _write_tokenizer(folder, spec, tokenizer_file)


def init_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Fresh float32 weights: normal with standard deviation 0.02, biases 0, norms 1; a pure function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(spec).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * _INIT_STD
    return weights


def rope_tables(spec: ModelSpec, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of positions 0 to length - 1, each [length, head_dim], halves repeated: with
    rotate_half(x) = (-x2, x1), a rotated head is x * cos + rotate_half(x) * sin."""
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: no model folder, it has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object, got {type(value).__name__}")
    return value


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def _rope_theta(folder: Path, config: Mapping[str, Any]) -> float:
    """transformers 5 keeps it under rope_parameters, older folders at the top beside rope_scaling."""
    for group in ("rope_parameters", "rope_scaling"):
        rope = config.get(group) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{folder}: {group}.rope_type must be default, got {kind!r}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                f"{folder}: {group}.partial_rotary_factor must be 1, got {rope['partial_rotary_factor']!r}"
            )
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json knows better than config.json, where both name end tokens."""
    file = folder / "generation_config.json"
    ids = (_read_json(file) if file.exists() else {}).get("eos_token_id")
    ids = config.get("eos_token_id") if ids is None else ids
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"{folder}: eos_token_id must be a token id or a list of them, got {ids!r}")
    return tuple(ids)


def _weight_files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    index = source / "model.safetensors.index.json"
    if not index.exists():
        return [source / "model.safetensors"]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index}: has no weight_map")
    return [source / name for name in sorted(set(names.values()))]


def _write_tokenizer(folder: Path, spec: ModelSpec, tokenizer_file: Path) -> None:
    target = folder / "tokenizer.json"
    if tokenizer_file.absolute() != target.absolute():
        shutil.copyfile(tokenizer_file, target)
    settings = tokenizer_file.with_name("tokenizer_config.json")
    if settings.exists():
        if settings.absolute() != (folder / settings.name).absolute():
            shutil.copyfile(settings, folder / settings.name)
        return
    tokenizer = _read_json(tokenizer_file)
    names = {token: text for text, token in tokenizer.get("model", {}).get("vocab", {}).items()}
    names |= {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    eos = next((names[token] for token in spec.eos_token_ids if token in names), None)
    _write_json(
        folder / settings.name,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": eos,
            "model_max_length": spec.context,
            "clean_up_tokenization_spaces": False,
        },
    )
