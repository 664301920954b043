"""Engines by name, and their capabilities. Other modules query capabilities, never engine names.

An engine named by an import path declares its capabilities. Its function has an attribute `traits`, a TrainingTraits or
a GenerationTraits. Without `traits` the defaults below hold. The checks before a run and the process of the engine
import it. Loading a configuration does not. So `emulates`, `own_server` and `in_process` are only for registered
engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from areal_core.config.plugins import find
from areal_core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTraits:
    """Capabilities of a generation engine."""

    emulates: bool = False  # time passes and nothing is computed
    own_server: bool = False  # has its own server, configured by generation.vllm; else this package's serves it
    in_process: bool = False  # the evaluator may run it in its own process, on a core
    sleeps: bool = False  # frees model weights and KV cache while asleep
    swaps_adapters: bool = True  # running requests continue with a new adapter
    any_model: bool = True  # serves models that only transformers' modules can train
    max_temperature: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTraits:
    """Capabilities of a training engine."""

    emulates: bool = False  # time passes and nothing is computed
    shards: bool = False  # ranks partition its state by training.zero_stage; else every rank holds it all


GENERATION_ENGINES = {
    "embedded": GenerationTraits(in_process=True, any_model=False),
    "vllm": GenerationTraits(own_server=True, sleeps=True, swaps_adapters=False, max_temperature=2.0),
    "emulated": GenerationTraits(emulates=True),
}
TRAINING_ENGINES = {
    "torch": TrainingTraits(),
    "deepspeed": TrainingTraits(shards=True),
    "emulated": TrainingTraits(emulates=True),
}


def known_generation(name: str) -> GenerationTraits:
    """Capabilities of a registered generation engine; defaults for an import path, without importing it."""
    return GENERATION_ENGINES.get(name, GenerationTraits())


def generation_traits(field: str, name: str) -> GenerationTraits:
    """Capabilities of any generation engine.
    Raises ConfigError, starting with `field`, for an import path that can't be imported."""
    return traits_of(field, name, GENERATION_ENGINES, GenerationTraits())


def names(engines: Mapping[str, T], trait: str, value: bool = True) -> str:
    """Names of registered engines whose capability `trait` is `value`, for error messages."""
    return " or ".join(name for name, traits in engines.items() if getattr(traits, trait) is value)


def traits_of(field: str, name: str, registered: Mapping[str, T], default: T) -> T:
    """Capabilities of any engine; `default` for an import path that states none.
    Raises ConfigError, starting with `field`, for an import path that can't be imported."""
    if name in registered:
        return registered[name]
    stated = getattr(find(field, name, dict[str, object]()), "traits", default)
    if not isinstance(stated, type(default)):
        raise ConfigError(f"{field}: the traits of {name} must be a {type(default).__name__}, got {stated!r:.80}")
    return stated
