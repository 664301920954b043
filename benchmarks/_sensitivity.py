"""Sensitivity of the ratios of `benchmarks.emulated`: the time model with one parameter varied at a time.

After every change `decode_overhead_s` is fitted again to the synchronous step of the first row, as in the
configuration. So each variation shows its prediction for the other rows. The last variations set the overhead instead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from areal_core.config.schema import RunConfig
from areal_core.planning.time_model import MODELS
from benchmarks import _harness
from benchmarks._step_times import asynchronous_s, synchronous_s

_SEEDS = (1, 2, 3)  # of a synchronous step, whose longest completions are a matter of chance
_OVERHEAD = "decode_overhead_s"  # variations of it are not fitted
_FITS = 2  # corrections; a step's time grows with the overhead all but linearly


@dataclass(frozen=True, kw_only=True)
class Arms:
    """One row: a cluster in both modes."""

    sync: RunConfig
    asynchronous: RunConfig


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Emulated seconds of a training step of one row, and the overhead of a decode step."""

    overhead_s: float
    sync_s: float
    async_s: float

    @property
    def ratio(self) -> float:
        return self.sync_s / self.async_s


Rows = Mapping[str, Arms]
Vary = Callable[[RunConfig], RunConfig]


def _emulation(**values: float) -> Vary:
    return lambda config: replace(config, emulation=replace(config.emulation, **values))


def _scaled(field: str, factor: float) -> Vary:
    return lambda config: _emulation(**{field: factor * getattr(config.emulation, field)})(config)


def _spread(sigma: float) -> Vary:
    """Change the spread of the lengths and keep their mean before the limit."""

    def vary(config: RunConfig) -> RunConfig:
        its = config.emulation
        median = its.length_median * math.exp((its.length_sigma**2 - sigma**2) / 2)
        return _emulation(length_sigma=sigma, length_median=median)(config)

    return vary


def _where(holds: Callable[[RunConfig], bool], vary: Vary) -> Vary:
    return lambda config: vary(config) if holds(config) else config


def _is_code(config: RunConfig) -> bool:
    return config.emulation.rewards_s > 0


def _is_async(config: RunConfig) -> bool:
    return config.mode == "async"


def _in_flight(factor: float) -> Vary:
    return _where(
        _is_async,
        lambda config: replace(
            config, generation=replace(config.generation, slots=round(factor * config.generation.slots))
        ),
    )


def _split(servers: int, ranks: int) -> Vary:
    """Split the devices of synchronous runs. Each server decodes its share of the batch at once."""

    def vary(config: RunConfig) -> RunConfig:
        slots = -(-config.rollout.batch_size // servers)
        return replace(
            config,
            generation=replace(config.generation, servers=servers, slots=slots),
            training=replace(config.training, ranks=ranks),
        )

    return _where(lambda config: not _is_async(config), vary)


def _by_layers(config: RunConfig) -> RunConfig:
    """Scale the overhead of a decode step with the number of layers; the smallest model keeps its overhead."""
    share = MODELS[config.emulation.model].spec.layers / min(model.spec.layers for model in MODELS.values())
    return _scaled("decode_overhead_s", share)(config)


# How it is called, what it changes. Ranges: docs/emulation.md.
VARIATIONS: dict[str, Vary] = {
    "as configured": lambda config: config,
    "bandwidth_share 0.6": _emulation(bandwidth_share=0.6),
    "bandwidth_share 1": _emulation(bandwidth_share=1.0),
    "memory_share 0.6": _emulation(memory_share=0.6),
    "memory_share 0.9": _emulation(memory_share=0.9),
    "training_share x 0.85": _scaled("training_share", 0.85),
    "training_share x 1.15": _scaled("training_share", 1.15),
    "length_sigma 0.6": _spread(0.6),
    "length_sigma 1": _spread(1.0),
    "code as long as mathematics": _where(_is_code, _emulation(length_median=7360.0)),
    "code: length_median 14000": _where(_is_code, _emulation(length_median=14000.0)),
    "code: rewards_s 9": _where(_is_code, _emulation(rewards_s=9.0)),
    "code: rewards_s 300": _where(_is_code, _emulation(rewards_s=300.0)),
    "all_reduce_s 0": _emulation(all_reduce_s=0.0),
    "all_reduce_s 40e-6": _emulation(all_reduce_s=40e-6),
    "prefill_share 0.3": _emulation(prefill_share=0.3),
    "handover_s 10": _emulation(handover_s=10.0),
    "half a batch in flight": _in_flight(0.5),
    "three batches in flight": _in_flight(3.0),
    "sync: 75 % generate, 25 % train": _split(3, 1),
    "sync: all generate, then train": _split(4, 4),
    "overhead by layers": _by_layers,
    "decode_overhead_s 0.003": _emulation(decode_overhead_s=0.003),
    "decode_overhead_s 0.0168": _emulation(decode_overhead_s=0.0168),
}


def study(rows: Rows, fit_to_s: float, names: Sequence[str] = tuple(VARIATIONS)) -> dict[str, dict[str, Steps]]:
    """Steps by variation and row.
    `fit_to_s` is the time of the synchronous step of the first row, in seconds."""
    with _harness.processes(2) as pool:
        found = pool.map(_vary, names, [rows] * len(names), [fit_to_s] * len(names))
        return dict(zip(names, found, strict=True))


def _vary(name: str, rows: Rows, fit_to_s: float) -> dict[str, Steps]:
    vary = VARIATIONS[name]
    first = next(iter(rows.values())).sync
    if name.startswith(_OVERHEAD):
        overhead_s = vary(first).emulation.decode_overhead_s
    else:
        overhead_s = fitted(first, vary, fit_to_s)

    def varied(config: RunConfig) -> RunConfig:
        return vary(_emulation(decode_overhead_s=overhead_s)(config))

    return {
        row: Steps(
            overhead_s=overhead_s,
            sync_s=mean_synchronous_s(varied(arms.sync)),
            async_s=asynchronous_s(varied(arms.asynchronous)),
        )
        for row, arms in rows.items()
    }


def fitted(config: RunConfig, vary: Vary, to_s: float) -> float:
    """Fit the overhead of a decode step to the time of a synchronous step; 0 if that takes longer without overhead."""
    overhead_s = config.emulation.decode_overhead_s
    longest = config.task.max_new_tokens * config.emulation.tokens_per_token  # decode steps of a synchronous step
    for _ in range(_FITS):
        varied = vary(_emulation(decode_overhead_s=overhead_s)(config))
        overhead_s = max(0.0, overhead_s + (to_s - mean_synchronous_s(varied)) / longest)
    return overhead_s


def mean_synchronous_s(config: RunConfig) -> float:
    return statistics.fmean(synchronous_s(replace(config, seed=seed)) for seed in _SEEDS)
