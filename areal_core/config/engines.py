"""Engines by name, and their capabilities. Other modules ask for a capability; none compares names of engines.

An engine that an import path names states its own: an attribute `traits` of the function, a TrainingTraits or a
GenerationTraits. Without it the defaults below hold. It is imported by the checks before a run and by the process that
runs it, not where a configuration is loaded; so `emulates`, `own_server` and `in_process` are for registered ones.
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
    own_server: bool = False  # it comes with a server, which generation.vllm configures; else this package's serves it
    in_process: bool = False  # the evaluator may run it itself, on a core
    sleeps: bool = False  # asleep, it gives weights and KV cache back
    swaps_adapters: bool = True  # requests that run go on under a new adapter
    any_model: bool = True  # it runs models that only transformers' modules train
    max_temperature: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTraits:
    """Capabilities of a training engine."""

    emulates: bool = False  # time passes and nothing is computed
    shards: bool = False  # ranks partition its state, as training.zero_stage says; else every rank holds all of it


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
    """Those of a registered engine, the defaults for an import path, which is not imported."""
    return GENERATION_ENGINES.get(name, GenerationTraits())


def generation_traits(field: str, name: str) -> GenerationTraits:
    """Those of any engine. Raises ConfigError that begins with `field` for an import path that can't be imported."""
    return _traits(field, name, GENERATION_ENGINES, GenerationTraits())


def training_traits(name: str) -> TrainingTraits:
    """Those of any engine. Raises ConfigError for an import path that can't be imported."""
    return _traits("training.engine", name, TRAINING_ENGINES, TrainingTraits())


def names(engines: Mapping[str, T], trait: str, value: bool = True) -> str:
    """The registered engines whose capability `trait` is `value`, for error messages."""
    return " or ".join(name for name, traits in engines.items() if getattr(traits, trait) is value)


def _traits(field: str, name: str, registered: Mapping[str, T], default: T) -> T:
    if name in registered:
        return registered[name]
    stated = getattr(find(field, name, dict[str, object]()), "traits", default)
    if not isinstance(stated, type(default)):
        raise ConfigError(f"{field}: the traits of {name} must be a {type(default).__name__}, got {stated!r:.80}")
    return stated
