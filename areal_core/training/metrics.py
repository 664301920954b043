"""Metrics of a training step, by the names that docs/metrics.md explains."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_core.config.schema import RunConfig
from areal_core.errors import StorageError
from areal_core.models.spec import ModelSpec
from areal_core.storage import weights
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import StepStats, TrainingBatch, TrainingEngine
from areal_core.training.flops import step_flops
from areal_core.training.hardware import peak_flops_per_s, peak_memory_bytes
from areal_core.types import BatchManifest


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """When the parts of a step ended; monotonic seconds."""

    waiting_since: float
    start: float  # the batch was there
    recomputed: float = 0.0
    trained: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured in a step, over all ranks."""

    staleness: Counter[int]  # sampled tokens by the version trained on - the one that sampled them
    trained_tokens: float  # of the sequences that were trained on, prompts included
    flops: float  # model FLOPs
    train_inference_kl: float | None  # k3 of trainer against generator, nats a token; None: not measured
    summing_s: float  # seconds of the sums over ranks: nearly all of it is waiting for ranks that still compute


class StepMeter:
    """Measures the steps of one rank, and makes rank 0's metrics of them."""

    def __init__(
        self, config: RunConfig, spec: ModelSpec, engine: TrainingEngine, ranks: RankGroup, store: Path
    ) -> None:
        """`store`: the folder of published versions."""
        self._config = config
        self._spec = spec
        self._engine = engine
        self._ranks = ranks
        self._reports = ranks.rank == 0
        self._store = store
        self._device = torch.device(config.launch.accelerator)
        self._peak_flops_per_s = None  # of this rank's device, where it is known
        if self._reports and not config.emulated:
            self._peak_flops_per_s = peak_flops_per_s(self._device, getattr(torch, config.training.dtype))

    def measure(self, batch: TrainingBatch, stats: StepStats) -> Measured:
        """Collective. Measure a step, once its batch has been trained on."""
        config = self._config
        lags = batch.step - 1 - batch.versions[batch.versions >= 0]
        counts = np.bincount(lags, minlength=batch.step).astype(np.float64)
        flops = step_flops(
            self._spec,
            batch,
            proximal=config.recomputes_proximal,
            reference=config.algorithm.kl_coef > 0,
            frozen=config.training.lora.rank is not None,
        )
        tokens = batch.lengths[batch.has_gradient].sum()
        start = time.perf_counter()
        *total, all_tokens, all_flops = self._ranks.all_reduce_sum(np.append(counts, (tokens, flops))).tolist()
        summing_s = time.perf_counter() - start
        return Measured(
            summing_s=summing_s,
            staleness=Counter({lag: int(count) for lag, count in enumerate(total) if count}),
            trained_tokens=all_tokens,
            flops=all_flops,
            train_inference_kl=self._train_inference_kl(batch, stats) if self._reports else None,
        )

    def values(
        self, manifest: BatchManifest, stats: StepStats, measured: Measured, times: StepTimes
    ) -> dict[str, float]:
        """The step's metrics."""
        config = self._config
        waited_s, busy_s = times.start - times.waiting_since, times.end - times.start
        compute_s = self._engine.compute_s() + measured.summing_s
        values = {
            "time/batch_wait_s": waited_s,
            "time/proximal_s": times.recomputed - times.start,
            "time/train_s": times.trained - times.recomputed,
            "time/compute_s": compute_s,
            "time/trainer_s": busy_s,
            "time/overhead_share": 1 - compute_s / busy_s,
            "throughput/trained_tokens_per_s_per_device": measured.trained_tokens / busy_s / config.training_ranks,
            "bubble/trainer_wait": waited_s / (waited_s + busy_s),
        }
        if self._peak_flops_per_s is not None:
            peak = config.trainer_processes * self._peak_flops_per_s
            values["throughput/mfu"] = measured.flops / (busy_s * peak)
        if not config.emulated:
            values["memory/trainer_peak_gib"] = peak_memory_bytes(self._device) / 2**30
        return values | step_metrics(manifest, stats, measured.staleness, measured.train_inference_kl)

    def _train_inference_kl(self, batch: TrainingBatch, stats: StepStats) -> float | None:
        """Mean k3 of trainer against generator on the same weights, nats: over tokens of the version just trained on,
        else, every `tracking.table_every` steps, over a sample of the newest tokens whose version is still stored."""
        sharded = self._config.zero_stage == 3  # no rank can hold a whole model
        if stats.train_inference_kl is not None or batch.step % self._config.tracking.table_every or sharded:
            return stats.train_inference_kl
        for number in sorted(set(batch.versions[batch.loss_mask].tolist()), reverse=True):
            try:
                published = weights.read_manifest(weights.version_folder(self._store, number))
                total, tokens = self._engine.train_inference_kl(batch, weights.load(published), number)
            except StorageError:
                continue  # released meanwhile, or the base, which is a model folder
            if tokens:
                return total / tokens
        return None


def step_metrics(
    manifest: BatchManifest, stats: StepStats, staleness: Counter[int], train_inference_kl: float | None
) -> dict[str, float]:
    """The metrics of one step. staleness: sampled tokens of the batch by their staleness, versions.

    train_inference_kl: of trainer against generation server, nats a token; None where it was not measured.
    """
    token_mean = sum(lag * count for lag, count in staleness.items()) / max(staleness.total(), 1)
    sampled = sum(sum(group.lengths) for group in manifest.groups)
    queued = sum(sum(group.lengths) * (manifest.step - 1 - group.ready_version) for group in manifest.groups)
    values = {
        **stats.curves,
        "staleness/token_mean": token_mean,
        "staleness/queue_mean": queued / sampled,
        "staleness/in_flight_mean": token_mean - queued / sampled,
        "staleness/token_max": max(staleness, default=0),
    }
    if train_inference_kl is not None:
        values["policy/train_inference_kl"] = train_inference_kl
    return values
