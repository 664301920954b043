"""The interface between a generation server and its engine, the records that they exchange, and the engines by name.
Without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

from areal_core.config.plugins import find
from areal_core.errors import ModelError, one_line
from areal_core.models.spec import ModelSpec, read_arrays
from areal_core.models.verified import verified
from areal_core.storage.weights import weights_file
from areal_core.types import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Completions of a request that have ended."""

    request: GenerationRequest
    completions: dict[int, Completion]  # by their index
    last: bool  # no other completion of the request is left


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the cost of the last update."""

    generated_tokens: int = 0
    rollout_tokens: int = 0  # of these, the ones of requests whose id says that they are the rollout's
    swap_ms: float = 0.0
    recompute_ms: float = 0.0
    recomputed_tokens: int = 0


class ServedEngine(Protocol):
    """An engine that one thread steps; `check`, `read` and `prepare` may be called by any."""

    spec: ModelSpec
    version: int
    admitting: bool  # False: running completions go on, waiting ones stay where they are

    @property
    def running(self) -> int:
        """Completions being decoded."""
        ...

    @property
    def waiting(self) -> int:
        """Completions that wait for a slot."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def check(self, request: GenerationRequest) -> None:
        """Raise GenerationError, its message starting with the field's name, if the request can't be served."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises GenerationError as `check` does, and for an id that is being served."""
        ...

    def step(self) -> list[Generation]:
        """Go on decoding for a short while; the completions that this finished."""
        ...

    def abort(self, request_ids: Collection[str] | None = None) -> list[Generation]:
        """End requests (None: all of them) now, with what they have; unknown ids are passed over."""
        ...

    def read(self, file: Path) -> Any:
        """The weights of a safetensors file, or of a model folder that has several; of one that holds an adapter
        (models.adapters), those of the base model with it. Raises ModelError when the engine can't run them."""
        ...

    def prepare(self, weights: Any) -> Any:
        """Weights made ready for `swap`; touches nothing of the engine."""
        ...

    def swap(self, prepared: Any, version: int, /, *, recompute: bool = True) -> None:
        """Swap the weights; with `recompute` running completions go on with a KV cache of the new ones."""
        ...

    def clear_cache(self) -> None:
        """Clear the KV cache: before the next step, that of running completions is recomputed."""
        ...


def read_version(engine: ServedEngine, path: Path, digest: str) -> Any:
    """The weights of a file or folder that has this hash, made ready for `swap`; touches nothing that runs. Raises
    ModelError for others, and for what the engine can't run."""
    one = weights_file(path)
    try:
        with verified(path, digest):
            weights = engine.read(one if one.exists() else path)
    except (OSError, ValueError) as error:
        raise ModelError(one_line(error)) from error
    return engine.prepare(weights)


class Options(TypedDict):
    """How an engine is made."""

    slots: int  # completions decoded at once
    context: int  # tokens of a sequence: prompt and completion
    version: int  # of the weights that it begins with
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
