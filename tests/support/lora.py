"""Adapters for tests: one whose B is not 0, and what transformers makes of a model folder with peft's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from areal_core.config.groups import LoraConfig
from areal_core.models.adapters import adapter_shapes
from areal_core.models.spec import ModelSpec
from areal_core.types import Float32Array, Lora

LORA = LoraConfig(rank=3, alpha=12.0)


def form(config: LoraConfig = LORA) -> Lora:
    assert config.adapter is not None
    return config.adapter


def adapter(spec: ModelSpec, lora: Lora | None = None, seed: int = 0) -> dict[str, Float32Array]:
    """Large enough that the policy is another one without it."""
    rng = np.random.default_rng(seed)
    shapes = adapter_shapes(spec, lora or form())
    return {name: (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def by_peft(base: Path, folder: Path) -> Any:
    """transformers' model of the folder `base` with the adapter in `folder`, as peft loads it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()
