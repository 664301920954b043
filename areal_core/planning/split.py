"""Best split of the devices between generation and training, from the metrics of an earlier run.

If stages have their own devices, the slower one determines the throughput X of S servers and R ranks:

    X(S, R) = efficiency * min(S g(n), R t),   g(n) = n / (a + b n)

t is the training rate of a rank: consumed tokens over the time in which ranks worked. A server with n running
completions generates one token of each in a + b n seconds. The line is fitted to the steps of the run. Reading the
model weights takes a constant time, and reading keys and values a time proportional to n. n is `generation.slots`, or
the number of running completions that the staleness bound admits per server, if smaller. Finished completions count as
admitted until their group is consumed. The efficiency is that of the measured run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import curves_of

Floats = Sequence[float] | NDArray[np.float64]
Curves = Mapping[str, Sequence[tuple[int, float]]]  # metric -> [(step, value), ...]
_ALIKE = 0.05  # relative spread of loads below which the slope can't be fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePace:
    """Seconds per decode step of a server with n running completions: fixed_s + completion_s n."""

    fixed_s: float
    completion_s: float

    def tokens_per_s(self, completions: float) -> float:
        return completions / (self.fixed_s + self.completion_s * completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates that a run measured."""

    effective_tokens_per_s: float
    generated_tokens_per_s: float
    trained_share: float  # share of the time in which ranks worked
    running_share: float  # mean share of a group's completions that run: mean length / longest length
    pace: DecodePace


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A number of servers and ranks, and the estimated throughput."""

    servers: int
    ranks: int
    ratio: float  # effective throughput relative to the measured run

    @property
    def overrides(self) -> list[str]:
        return [f"generation.servers={self.servers}", f"training.ranks={self.ranks}"]


def rates(config: RunConfig, curves: Curves) -> Rates | None:
    """The rates of a run of `config` from its metrics; None if stages share devices or data are missing.
    The first steps are left out, because all their completions started at once. So are the last ones, for which no more
    groups are admitted. If there are no other steps, all steps count."""
    if config.mode == "sync" or not config.max_staleness or config.shares_cores:
        return None
    points = {key: dict(curves.get(key, ())) for key in _NEEDED}
    steps = sorted(set.intersection(*(set(values) for values in points.values())))
    ends = range(config.max_staleness + 2, config.training.steps - config.max_staleness)
    steps = [step for step in steps if step in ends] or steps
    if not steps:
        return None
    taken, generated, consumed, running, idle, paused, waited, mean, longest = (
        np.array([points[key][step] for step in steps]) for key in _NEEDED
    )
    busy = 1.0 - idle - paused
    known = (busy > 0) & (generated > 0)
    if not known.any():
        return None
    completions, weights = running[known] / busy[known], taken[known]
    seconds = running[known] * config.generation_servers / generated[known]  # seconds per decode step of a server
    total = taken.sum()
    return Rates(
        effective_tokens_per_s=float((consumed * taken).sum() / total),
        generated_tokens_per_s=float((generated * taken).sum() / total),
        trained_share=float(((1.0 - waited) * taken).sum() / total),
        running_share=float(mean.sum() / longest.sum()),
        pace=decode_pace(completions, seconds, weights),
    )


_NEEDED = (
    "time/step_s",
    "throughput/generated_tokens_per_s",
    "throughput/effective_tokens_per_s",
    "rollout/running_completions",
    "bubble/generation_idle",
    "bubble/generation_paused",
    "bubble/trainer_wait",
    "completion/tokens_mean",
    "completion/tokens_longest",
)


def decode_pace(completions: Floats, seconds: Floats, weights: Floats) -> DecodePace:
    """Fit seconds per token to running completions, by weighted least squares with non-negative terms.
    If all loads are alike, the slope is unknown; then the time is taken as constant."""
    mean_n, mean_tau = (float(np.average(values, weights=weights)) for values in (completions, seconds))
    spread, together = np.cov(completions, seconds, ddof=0, aweights=weights)[0]
    if spread <= (_ALIKE * mean_n) ** 2:
        return DecodePace(fixed_s=mean_tau, completion_s=0.0)
    slope = min(max(float(together / spread), 0.0), mean_tau / mean_n)
    return DecodePace(fixed_s=mean_tau - slope * mean_n, completion_s=slope)


def generation_used(config: RunConfig, measured: Rates) -> float:
    """Generated tokens, as a share of the tokens that the servers could have generated."""
    able = _able(config, measured, config.generation_servers)
    return min(1.0, measured.generated_tokens_per_s / able)


def splits(config: RunConfig, measured: Rates) -> list[Split]:
    """All splits of the run's devices that `config` allows, best first.
    Equal ones are sorted by their distance from the run's own split."""
    useful = min(1.0, measured.effective_tokens_per_s / measured.generated_tokens_per_s)  # share of tokens not dropped

    def limit(servers: int, ranks: int) -> float:
        generated = _able(config, measured, servers) * useful
        trained = ranks * measured.effective_tokens_per_s / (config.training_ranks * measured.trained_share)
        return min(generated, trained)

    own = limit(config.generation_servers, config.training_ranks)
    found = [
        Split(servers=servers, ranks=ranks, ratio=limit(servers, ranks) / own)
        for ranks in range(1, config.launch.devices)
        if (servers := (config.launch.devices - ranks) // config.devices_per_server) and _fits(config, servers, ranks)
    ]
    return sorted(found, key=lambda split: (-split.ratio, abs(split.ranks - config.training_ranks)))


def _able(config: RunConfig, measured: Rates, servers: int) -> float:
    """Tokens per second of `servers` servers if generation is the bottleneck.
    Of the groups admitted beside the batch in training, half a batch waits for completion."""
    admitted = (config.pipeline_depth + 0.5) * config.rollout.batch_size
    running = measured.running_share * admitted / servers
    return servers * measured.pace.tokens_per_s(min(config.generation.slots, running))


def _fits(config: RunConfig, servers: int, ranks: int) -> bool:
    values = config.to_dict()
    values["generation"]["servers"], values["training"]["ranks"] = servers, ranks
    try:
        load(values)
    except ConfigError:
        return False
    return True


def advice(config: RunConfig, measured: Rates) -> str | None:
    """One sentence on the best split of the devices; None if they can't be split."""
    found = splits(config, measured)
    if not found:
        return None
    best = found[0]
    if (best.servers, best.ranks) == (config.generation_servers, config.training_ranks):
        return f"These rates suggest no better split of the {config.launch.devices} devices."
    return (
        f"By these rates {best.servers} servers and {best.ranks} ranks would be {best.ratio:.2f} times as fast as "
        f"{config.generation_servers} and {config.training_ranks} ({' '.join(best.overrides)})."
    )


def splits_of_run(run: RunDir) -> list[Split]:
    """All splits by the metrics of a run, best first. Raises ConfigError if the metrics are insufficient."""
    try:
        config, run_id = run.config(), run.info().run_id
    except FileNotFoundError:
        raise ConfigError(f"run: {run.root} holds no run") from None
    measured = rates(config, curves_of(run.outbox, run_id))
    if measured is None:
        raise ConfigError(
            f"run: {run_id} can't be evaluated; use a run whose servers and ranks have their own devices "
            "(mode=async on GPUs, or emulated) and that has completed some steps"
        )
    return splits(config, measured)
