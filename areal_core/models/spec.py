"""Read the spec of a model folder, and check the folder's tensors against it, without torch.

Names and shapes of tensors are those of transformers ("model.layers.0.self_attn.q_proj.weight"). For Qwen2, Qwen3 and
Llama decoders they follow from the spec. For other models, which only transformers and vLLM run, they come from the
files. `read_arrays` reads numpy arrays, for engines without torch, whose import costs every process 1.5 s and 200 MB.
`areal_core.models.folders` reads tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from areal_core.errors import ModelError
from areal_core.models.tensorfile import as_float32, equal_bytes, mapped_tensors
from areal_core.types import Float32Array

MODEL_TYPES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
_HEAD = "lm_head.weight"
_OTHER_NAMES = {  # of fields, in configurations of older models
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


class _UnsupportedError(ModelError):
    """The model is sound but needs something that this package's own forward pass lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel:
    """A model that transformers' own modules train and vLLM serves."""

    why: str  # why this package can't run it: the field of config.json, the supported values, its value
    config: str  # config.json
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder. This package's own forward passes use plain rotary embeddings and SwiGLU with silu."""

    architecture: str  # one of MODEL_TYPES, or another of transformers
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of queries and keys, before rotation
    tie_embeddings: bool
    context: int  # tokens, prompt and completion together
    eos_token_ids: tuple[int, ...]
    transformers: TransformersModel | None = None  # if set, only the size fields above apply

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in weight_shapes(self).values())


def read_spec(folder: str | Path) -> ModelSpec:
    """Read the spec of a model folder from config.json and generation_config.json.

    If this package's own forward pass lacks a feature, the spec is one for transformers' module, and the tensor files
    are inspected too. Such features are other architectures, rope scaling, sliding windows, other activations, other
    biases.

    Raises ModelError naming the folder and the field if the folder is missing or broken.
    """
    folder = Path(folder)
    config = _Config(folder, read_json(folder / "config.json"))
    try:
        return _own(config)
    except _UnsupportedError as lack:
        return _by_transformers(config, str(lack))


class _Config:
    """The fields of config.json, with their types checked."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self.values = values

    @property
    def architecture(self) -> str:
        named = self.values.get("architectures")
        if not isinstance(named, list) or not named or not isinstance(named[0], str):
            raise ModelError(
                f'{self.folder}/config.json: architectures must be a list such as ["Qwen2ForCausalLM"], got {named!r}'
            )
        return named[0]

    def get(self, name: str) -> Any:
        value = self.values.get(name)
        return self.values.get(_OTHER_NAMES.get(name, name)) if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.folder}: config.json has no {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.folder}: {name} must be a whole number of at least 1, got {value!r}")
        return value

    def size(self, *, head_dim: int | None = None) -> dict[str, Any]:
        """Return the fields of a spec that give the model's size. `head_dim` is the default if config.json has none."""
        heads, hidden_size = self.count("num_attention_heads"), self.count("hidden_size")
        return {
            "vocab_size": self.count("vocab_size"),
            "hidden_size": hidden_size,
            "layers": self.count("num_hidden_layers"),
            "heads": heads,
            "kv_heads": self.count("num_key_value_heads", heads),
            "head_dim": self.count("head_dim", head_dim or hidden_size // heads),
            "context": self.count("max_position_embeddings"),
            "eos_token_ids": self.end_tokens(),
        }

    def end_tokens(self) -> tuple[int, ...]:
        """Return the end tokens of generation_config.json, or else those of config.json."""
        file = self.folder / "generation_config.json"
        ids = (read_json(file) if file.exists() else {}).get("eos_token_id")
        name, ids = ("config.json", self.values.get("eos_token_id")) if ids is None else (file.name, ids)
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        return check_tokens(ids, self.count("vocab_size"), f"{self.folder}: eos_token_id of {name}")

    def tied(self, default: bool) -> bool:
        """Tell whether the embedding is also the head.

        As in transformers, a stored head that differs from the embedding overrides tie_word_embeddings.
        """
        said = self.values.get("tie_word_embeddings")
        return bool(default if said is None else said) and not _has_own_head(self.folder)


def _own(config: _Config) -> ModelSpec:
    """Build the spec of a model that this package's own forward pass runs. Raises _UnsupportedError for others."""
    folder, architecture = config.folder, config.architecture
    if architecture not in MODEL_TYPES:
        raise _UnsupportedError(f"architectures must name one of {', '.join(MODEL_TYPES)}, got {architecture!r}")
    if (activation := config.get("hidden_act") or "silu") != "silu":
        raise _UnsupportedError(f"hidden_act must be silu, got {activation!r}")
    for unsupported in ("use_sliding_window", "mlp_bias", "attention_bias"):
        # Qwen2 always has its q, k and v biases, whatever attention_bias says.
        if config.get(unsupported) and not (unsupported == "attention_bias" and architecture == "Qwen2ForCausalLM"):
            raise _UnsupportedError(f"{unsupported} must be false, got {config.get(unsupported)!r}")
    kinds = config.get("layer_types") or []
    others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if others:
        raise _UnsupportedError(f"layer_types must be full_attention in every layer, got {others[0]!r}")
    qwen3 = architecture == "Qwen3ForCausalLM"
    size = config.size(head_dim=128 if qwen3 else None)  # the default of transformers
    heads, kv_heads, head_dim = size["heads"], size["kv_heads"], size["head_dim"]
    if heads % kv_heads:
        raise ModelError(f"{folder}: num_key_value_heads must divide num_attention_heads ({heads}), got {kv_heads}")
    if head_dim % 2:
        raise ModelError(f"{folder}: head_dim must be even, got {head_dim}")
    return ModelSpec(
        architecture=architecture,
        intermediate_size=config.count("intermediate_size"),
        rope_theta=_number(folder, "rope_theta", _rope_theta(folder, config.values)),
        rms_eps=_number(folder, "rms_norm_eps", config.get("rms_norm_eps") or 1e-6),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=qwen3,
        tie_embeddings=config.tied(default=False),
        **size,
    )


def _by_transformers(config: _Config, why: str) -> ModelSpec:
    if config.get("quantization_config"):
        raise ModelError(f"{config.folder}: quantization_config must be absent: quantised weights can't be trained")
    shapes = {name: tensor.shape for name, tensor in stored_tensors(config.folder).items()}
    size, values = config.size(), dict(config.values)
    if _HEAD in shapes:  # explicit, because transformers may tie by default
        values["tie_word_embeddings"] = config.tied(default=True)
        if values["tie_word_embeddings"]:
            del shapes[_HEAD]
    return ModelSpec(
        architecture=config.architecture,
        intermediate_size=config.count("intermediate_size", 4 * size["hidden_size"]),
        tie_embeddings=_HEAD not in shapes,
        transformers=TransformersModel(why=why, config=json.dumps(values), tensors=tuple(shapes.items())),
        **size,
    )


def stop_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Read the end tokens of a model folder without loading the model. Raises ModelError."""
    return _Config(Path(folder), read_json(Path(folder) / "config.json")).end_tokens()


def check_tokens(ids: Sequence[Any], vocab_size: int, name: str) -> tuple[int, ...]:
    """Return `ids` if all are tokens of the model. Else raises ModelError, beginning with `name`."""
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ModelError(f"{name} must be token ids from 0 to {vocab_size - 1}, below vocab_size, got {ids!r}")
    return tuple(ids)


def write_config(folder: Path, spec: ModelSpec, dtype: str) -> None:
    """Write config.json and generation_config.json, as `read_spec` and transformers read them."""
    ids = {"bos_token_id": None, "eos_token_id": list(spec.eos_token_ids) or None, "pad_token_id": None}
    config = _config(spec) | {"dtype": dtype}
    if spec.transformers is None:
        config |= ids
    config.pop("torch_dtype", None)  # the name in older folders
    sampling = {"do_sample": True, "temperature": 1.0, **ids}
    for name, value in (("config.json", config), ("generation_config.json", sampling)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def _config(spec: ModelSpec) -> dict[str, Any]:
    if spec.transformers is not None:
        return dict(json.loads(spec.transformers.config))
    return {
        "architectures": [spec.architecture],
        "model_type": MODEL_TYPES[spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": "silu",
        "rope_theta": spec.rope_theta,  # for readers older than transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.context,
        "use_cache": True,
    }


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor; no lm_head.weight if embeddings are tied.

    The order is that of the forward pass. For transformers' module it is that of the files.
    """
    if spec.transformers is not None:
        return dict(spec.transformers.tensors)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        for name, width in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
            shapes[at + f"self_attn.{name}_proj.weight"] = (width * spec.head_dim, hidden)
            if spec.qkv_bias:
                shapes[at + f"self_attn.{name}_proj.bias"] = (width * spec.head_dim,)
        if spec.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, spec.heads * spec.head_dim)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes[_HEAD] = (spec.vocab_size, hidden)
    return shapes


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any], *, exactly: bool = False, of: str = ""
) -> None:
    """Raise ModelError naming the first tensor that is missing or has another shape.

    `exactly` also rejects surplus tensors. `of` begins the message.
    """
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"{of}{name}: tensor is missing, expected shape {list(shape)}")
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{of}{name}: expected shape {list(shape)}, got {list(tensors[name].shape)}")
    for name in sorted(tensors.keys() - shapes.keys()) if exactly else ():
        raise ModelError(f"{of}{name}: no such tensor in this model")


def check_weights(spec: ModelSpec, weights: Mapping[str, Any]) -> None:
    """Raise ModelError naming the first tensor that is missing, surplus or of another shape."""
    check_shapes(weight_shapes(spec), weights, exactly=True)


def check_folder(folder: str | Path) -> ModelSpec:
    """Read the spec of a folder and check names and shapes of all its tensors, from their headers alone.

    Raises what `read_spec` raises, and ModelError naming the file or the tensor.
    """
    spec = read_spec(folder)
    check_shapes(weight_shapes(spec), stored_tensors(Path(folder)), of=f"{folder}: ")
    return spec


def _has_own_head(folder: Path) -> bool:
    """Tell whether the folder stores a head that is no copy of another tensor, the embedding."""
    stored = stored_tensors(folder, present=True)
    head = stored.pop(_HEAD, None)
    return head is not None and not any(equal_bytes(head, other) for other in stored.values())


def _weight_files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    index = source / "model.safetensors.index.json"
    if not index.exists():
        return [source / "model.safetensors"]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index}: has no weight_map")
    return [source / name for name in sorted(set(names.values()))]


def open_weights(file: Path) -> Any:
    """Open a safetensors file for reading, as a context manager. Raises ModelError if it is missing or damaged."""
    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({error})") from None


def stored_tensors(source: Path, *, present: bool = False) -> dict[str, NDArray[Any]]:
    """Map the tensors of a model folder (one safetensors file, or several with an index) or of one file.

    Raises ModelError for a damaged or missing file. `present` skips missing files instead.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for file in _weight_files(source):
        if file.exists() or not present:
            with open_weights(file):
                tensors |= mapped_tensors(file)
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: is not a model folder, it has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object, got {type(value).__name__}")
    return value


def _number(folder: Path, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{folder}: {name} must be a number greater than 0, got {value!r}")
    return float(value)


def _rope_theta(folder: Path, config: Mapping[str, Any]) -> Any:
    """Find rope_theta: under rope_parameters in transformers 5, at the top level in older folders.

    Raises _UnsupportedError for scaled or partial rotary embeddings.
    """
    for group in ("rope_parameters", "rope_scaling"):
        rope = config.get(group) or {}
        if not isinstance(rope, dict):
            raise ModelError(f"{folder}: {group} must be an object, got {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise _UnsupportedError(f"{group}.rope_type must be default, got {kind!r}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _UnsupportedError(f"{group}.partial_rotary_factor must be 1, got {rope['partial_rotary_factor']!r}")
    return (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0


def read_arrays(source: str | Path, spec: ModelSpec) -> dict[str, Float32Array]:
    """Read float32 model weights of a folder (one or several safetensors files) or of one file.

    Tensors that the model does not use are left out, for example a tied lm_head.weight. Raises ModelError naming the
    file or the tensor if something is missing, damaged or of another shape.
    """
    stored = stored_tensors(Path(source))
    found = {name: as_float32(stored[name]) for name in weight_shapes(spec) if name in stored}
    check_shapes(weight_shapes(spec), found, exactly=True, of=f"{source}: ")
    return found


def rope_tables(spec: ModelSpec, length: int) -> tuple[Float32Array, Float32Array]:
    """Compute cos and sin of the rotary angles of positions 0 to length - 1, each [length, head_dim / 2].

    They are float32, as transformers computes them.
    """
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    # Rounded where torch rounds: at far positions the last bit of a frequency matters, and numpy's float32 power errs.
    powers = np.float64(spec.rope_theta) ** exponents.astype(np.float64)
    frequencies = np.float32(1.0) / powers.astype(np.float32)
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)
