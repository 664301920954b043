"""The interface between a generation server and its engine, shared records, and engines by name.

This module does not use torch.
"""

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
    """Finished completions of a request."""

    request: GenerationRequest
    completions: dict[int, Completion]  # by index
    last: bool  # the request has no other completion left


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the cost of the last update."""

    generated_tokens: int = 0
    rollout_tokens: int = 0  # those of requests whose id marks them as the rollout's
    swap_ms: float = 0.0
    recompute_ms: float = 0.0
    recomputed_tokens: int = 0


class ServedEngine(Protocol):
    """An engine stepped by one thread; any thread may call `check`, `read` and `prepare`."""

    spec: ModelSpec
    version: int
    admitting: bool  # False: running completions continue, waiting ones keep waiting

    @property
    def running(self) -> int:
        """Number of completions being decoded."""
        ...

    @property
    def waiting(self) -> int:
        """Number of completions that wait for a slot."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def check(self, request: GenerationRequest) -> None:
        """Raise GenerationError, its message starting with the field's name, if the request can't be served."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises GenerationError as `check` does, and for a request id already being served."""
        ...

    def step(self) -> list[Generation]:
        """Decode for a short while. Returns the completions that finished."""
        ...

    def abort(self, request_ids: Collection[str] | None = None) -> list[Generation]:
        """End requests (None: all) now, with their tokens so far; unknown ids are ignored."""
        ...

    def read(self, file: Path) -> Any:
        """Read the model weights of a safetensors file or of a model folder with several.

        For an adapter (models.adapters) these are the base model's weights with the adapter added. Raises ModelError if
        the engine can't run them.
        """
        ...

    def prepare(self, weights: Any) -> Any:
        """Prepare model weights for `swap`, without any effect on the engine."""
        ...

    def swap(self, prepared: Any, version: int, /, *, recompute: bool = True) -> None:
        """Swap the model weights. With `recompute`, running completions continue with a KV cache of the new weights."""
        ...

    def clear_cache(self) -> None:
        """Clear the KV cache. The engine recomputes that of running completions before the next step."""
        ...


def read_version(engine: ServedEngine, path: Path, digest: str) -> Any:
    """Read and prepare the model weights with this hash for `swap`, beside running completions.

    Raises ModelError if the hash differs or the engine can't run the weights.
    """
    one = weights_file(path)
    try:
        with verified(path, digest):
            weights = engine.read(one if one.exists() else path)
    except (OSError, ValueError) as error:
        raise ModelError(one_line(error)) from error
    return engine.prepare(weights)


class Options(TypedDict):
    """Options of an engine."""

    slots: int  # completions decoded at once
    context: int  # tokens of a sequence: prompt and completion
    version: int  # version of the initial weights
    device: str  # cpu or cuda


MakeEngine = Callable[[Path, ModelSpec, Options], ServedEngine]


def make_engine(name: str, folder: Path, spec: ModelSpec, options: Options) -> ServedEngine:
    """Make the engine `name` for the model in `folder`.

    Raises ConfigError for an unavailable engine, ModelError for model weights that it can't run.
    """
    return find("generation.engine", name, _ENGINES)(folder, spec, options)


def _embedded(folder: Path, spec: ModelSpec, options: Options) -> ServedEngine:
    if spec.transformers is not None:
        raise ModelError(f"{folder}: {spec.transformers.why}; vLLM may support it")
    from areal_core.generation.engines.embedded import Engine  # imports the kernels, which an emulation doesn't need

    return Engine(spec, read_arrays(folder, spec), base=folder, **options)


_ENGINES: dict[str, MakeEngine] = {"embedded": _embedded}
