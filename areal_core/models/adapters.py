"""Adapters (LoRA): small matrices that are trained and published in place of the base model's weights.

A linear layer with weight W [out, in] computes W x + scale * B A x, with A [rank, in] and B [out, rank]. B starts at 0,
so version 0 is the base model. A and B have the name of W with `lora_A.weight` and `lora_B.weight` for `weight`.

Files are in peft's format, whose names have a prefix. The file header holds the Lora settings, so the file's hash
covers them. Needs numpy only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.errors import ConfigError, ModelError
from areal_core.models import hub
from areal_core.models.spec import ModelSpec, check_shapes, open_weights, stored_tensors, weight_shapes
from areal_core.models.tensorfile import Written, as_float32, write_tensors
from areal_core.types import Float32Array, Lora

ADAPTER = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_HEADER = "lora"  # key of the Lora settings in a file's header
_LAYER = re.compile(r"(?P<layer>.*\.\d+\..*?(?P<last>[^.]+))\.weight")  # inside one of the decoder's numbered layers


def adapter_shapes(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of an adapter. Raises ConfigError for a target that the model lacks."""
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, None] = {}  # of linear layers
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 2 and (match := _LAYER.fullmatch(name)):
            kinds[match["last"]] = None
            if match["last"] in lora.targets:
                shapes[f"{match['layer']}.lora_A.weight"] = lora.rank, shape[1]
                shapes[f"{match['layer']}.lora_B.weight"] = shape[0], lora.rank
    for target in lora.targets:
        if target not in kinds:
            raise ConfigError(f"training.lora.targets: must name linear layers of {', '.join(kinds)}, got {target!r}")
    return shapes


def trained_shapes(spec: ModelSpec, lora: Lora | None) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every trained tensor: of the adapter, or without one of the model."""
    return weight_shapes(spec) if lora is None else adapter_shapes(spec, lora)


def init_adapter(spec: ModelSpec, lora: Lora, seed: int) -> dict[str, Float32Array]:
    """Make a fresh adapter from a seed: B is 0, A uniform within +-1 / sqrt(in), as in peft."""
    generator = np.random.default_rng(seed)
    adapter: dict[str, Float32Array] = {}
    for name, shape in adapter_shapes(spec, lora).items():
        if name.endswith("lora_A.weight"):
            drawn = 2 * generator.random(shape, dtype=np.float32) - 1
            adapter[name] = drawn * np.float32(shape[1] ** -0.5)
        else:
            adapter[name] = np.zeros(shape, np.float32)
    return adapter


def merged(weights: Mapping[str, Float32Array], adapter: Mapping[str, Float32Array], lora: Lora) -> dict[str, Any]:
    """Return the model weights with the adapter added. Tensors without an adapter are not copied."""
    result: dict[str, Any] = dict(weights)
    for name, up in adapter.items():
        layer, is_b, _ = name.partition(".lora_B.weight")
        if is_b:
            delta = up @ adapter[f"{layer}.lora_A.weight"]
            result[f"{layer}.weight"] = weights[f"{layer}.weight"] + np.float32(lora.scale) * delta
    return result


def write_adapter(file: Path, adapter: Mapping[str, NDArray[Any]], lora: Lora) -> Written:
    """Write an adapter file in peft's format. Raises OSError."""
    tensors = {_PREFIX + name: array for name, array in adapter.items()}
    return write_tensors(file, tensors, header={_HEADER: json.dumps(asdict(lora))})


def write_adapter_config(folder: Path, lora: Lora, base: str = "") -> None:
    """Write the adapter_config.json that peft and vLLM read. Raises OSError.

    `base` is the base model: a folder, or its name on the Hub as in model.path.
    """
    name, _, revision = base.removeprefix(hub.PREFIX).partition("@") if base.startswith(hub.PREFIX) else (base, "", "")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "revision": revision or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_lora(file: Path) -> Lora | None:
    """Read the Lora settings of an adapter file; None for a file of whole model weights.

    Raises ModelError if the file is missing or damaged.
    """
    with open_weights(file) as tensors:
        found = (tensors.metadata() or {}).get(_HEADER)
    if found is None:
        return None
    values = json.loads(found)
    return Lora(rank=values["rank"], alpha=values["alpha"], targets=tuple(values["targets"]))


def own_names(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Rename tensors from peft's format to this package's names."""
    return {name.removeprefix(_PREFIX): array for name, array in tensors.items()}


def read_adapter(file: Path, spec: ModelSpec, lora: Lora) -> dict[str, Float32Array]:
    """Read an adapter file as float32. Raises ModelError naming the first tensor that does not fit the model."""
    adapter = {name: as_float32(stored) for name, stored in own_names(stored_tensors(file)).items()}
    try:
        check_shapes(adapter_shapes(spec, lora), adapter, exactly=True)
    except (ConfigError, ModelError) as error:
        raise ModelError(f"{file}: does not fit this model, it is an adapter of another one: {error}") from None
    return adapter
