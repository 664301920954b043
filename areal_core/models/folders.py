"""Read and write model folders of Qwen2, Qwen3 and Llama decoders as torch tensors.

Generation and training run the model weights each in their own way. What they must agree on is here and in
`areal_core.models.spec`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from areal_core.models.spec import ModelSpec, check_weights, read_arrays, read_json, weight_shapes, write_config
from areal_core.models.tokenizer import write_settings

_INIT_STD = 0.02
_SETTINGS = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")


def read_weights(source: str | Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Read model weights of a folder or safetensors file as float32 tensors. Raises as `read_arrays`."""
    return {name: torch.from_numpy(array) for name, array in read_arrays(source, spec).items()}


def write_model(
    folder: str | Path, spec: ModelSpec, weights: Mapping[str, Tensor], tokenizer_file: Path | None
) -> None:
    """Write a complete model folder in the transformers format.

    `tokenizer_file` is a tokenizer.json. Tokenizer settings, chat template and generation settings next to it are
    copied too. Raises ModelError if the tensors don't match the spec.
    """
    check_weights(spec, weights)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, spec, str(next(iter(weights.values())).dtype).removeprefix("torch."))
    save_file(
        {name: weights[name].contiguous() for name in weight_shapes(spec)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    if tokenizer_file is not None:
        _write_tokenizer(folder, spec, tokenizer_file)


def init_weights(spec: ModelSpec, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Make fresh float32 model weights: normal with standard deviation 0.02, biases 0, norms 1.

    The seed and the kind of device determine them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(spec).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, device=device)
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape, device=device)
        else:
            weights[name] = torch.randn(shape, generator=generator, device=device) * _INIT_STD
    return weights


def rope_tables(spec: ModelSpec, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Compute cos and sin of the rotary angles of positions 0 to length - 1, each [length, head_dim].

    The halves repeat. With rotate_half(x) = (-x2, x1), a rotated head is x * cos + rotate_half(x) * sin.
    """
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, **float32) / spec.head_dim)
    angles = torch.outer(torch.arange(length, **float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _write_tokenizer(folder: Path, spec: ModelSpec, tokenizer_file: Path) -> None:
    for source, name in ((tokenizer_file, "tokenizer.json"), *((tokenizer_file.with_name(n), n) for n in _SETTINGS)):
        target = folder / name
        if source.exists() and source.absolute() != target.absolute():
            shutil.copyfile(source, target)
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        return
    tokenizer = read_json(tokenizer_file)
    names = {token: text for text, token in tokenizer.get("model", {}).get("vocab", {}).items()}
    names |= {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    eos = next((names[token] for token in spec.eos_token_ids if token in names), None)
    write_settings(settings, eos=eos, context=spec.context)
