"""Generation engines that this package's server runs, by name: registered ones, and import paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from areal_core.config.plugins import find
from areal_core.errors import ModelError
from areal_core.generation.engines.engine import ServedEngine
from areal_core.models.spec import ModelSpec, read_arrays


class Options(TypedDict):
    """How an engine is made."""

    slots: int  # completions decoded at once
    context: int  # tokens of a sequence: prompt and completion
    version: int  # of the weights that it begins with
    deterministic: bool  # batch-invariant: the same tokens for the same seed in any batch
    device: str  # cpu or cuda


MakeEngine = Callable[[Path, ModelSpec, Options], ServedEngine]


def make_engine(name: str, folder: Path, spec: ModelSpec, options: Options) -> ServedEngine:
    """The engine of a name for the model in `folder`. Raises ConfigError for one that is not to be had, ModelError for
    weights that it can't run."""
    return find("generation.engine", name, _ENGINES)(folder, spec, options)


def _embedded(folder: Path, spec: ModelSpec, options: Options) -> ServedEngine:
    if spec.transformers is not None:
        raise ModelError(f"{folder}: {spec.transformers.why}; vLLM may run it")
    from areal_core.generation.engines.embedded import Engine  # kernels, which an emulation can do without

    return Engine(spec, read_arrays(folder, spec), base=folder, **options)


_ENGINES: dict[str, MakeEngine] = {"embedded": _embedded}
