"""Measure training steps. docs/metrics.md explains the names of metrics."""

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
from areal_core.training.flops import peak_flops_per_s, peak_memory_bytes, step_flops
from areal_core.types import BatchManifest


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Times at which the parts of a step ended; monotonic seconds."""

    waiting_since: float
    start: float  # the batch had arrived
    recomputed: float = 0.0
    trained: float = 0.0
    end: float = 0.0


class StepMeter:
    """Measures the steps of one rank. On rank 0 it also computes their metrics."""

    def __init__(
        self, config: RunConfig, spec: ModelSpec, engine: TrainingEngine, ranks: RankGroup, store: Path
    ) -> None:
        """`store` is the folder of published versions."""
        self._config = config
        self._spec = spec
        self._engine = engine
        self._ranks = ranks
        self._reports = ranks.rank == 0
        self._store = store
        self._device = torch.device(config.launch.accelerator)
        # Of the last measured step, over all ranks.
        self.staleness: Counter[int] = Counter()  # sampled tokens by staleness
        self._trained_tokens = self._flops = 0.0  # tokens of trained sequences, prompts included; model FLOPs
        self._summing_s = 0.0  # nearly all of it waits for ranks that still compute
        self._kl: float | None = None  # train/inference KL (k3), nats a token; None: not measured
        self._peak_flops_per_s = None  # of this rank's device; None: unknown
        if self._reports and not config.emulated:
            self._peak_flops_per_s = peak_flops_per_s(self._device, getattr(torch, config.training.dtype))

    def measure(self, batch: TrainingBatch, stats: StepStats) -> None:
        """Collective. Measure a step after training on its batch."""
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
        *total, self._trained_tokens, self._flops = self._ranks.all_reduce_sum(
            np.append(counts, (tokens, flops))
        ).tolist()
        self._summing_s = time.perf_counter() - start
        self.staleness = Counter({lag: int(count) for lag, count in enumerate(total) if count})
        self._kl = self._train_inference_kl(batch, stats) if self._reports else None

    def values(self, manifest: BatchManifest, stats: StepStats, times: StepTimes) -> dict[str, float]:
        """Return the metrics of the measured step, by curve name."""
        config, staleness = self._config, self.staleness
        waited_s, busy_s = times.start - times.waiting_since, times.end - times.start
        compute_s = self._engine.compute_s() + self._summing_s
        token_mean = sum(lag * count for lag, count in staleness.items()) / max(staleness.total(), 1)
        queued = sum(group.tokens * (manifest.step - 1 - group.ready_version) for group in manifest.groups)
        queue_mean = queued / sum(group.tokens for group in manifest.groups)
        values = {
            "time/batch_wait_s": waited_s,
            "time/proximal_s": times.recomputed - times.start,
            "time/train_s": times.trained - times.recomputed,
            "time/compute_s": compute_s,
            "time/trainer_s": busy_s,
            "time/overhead_share": 1 - compute_s / busy_s,
            "throughput/trained_tokens_per_s_per_device": self._trained_tokens / busy_s / config.training_ranks,
            "bubble/trainer_wait": waited_s / (waited_s + busy_s),
            "staleness/token_mean": token_mean,
            "staleness/queue_mean": queue_mean,
            "staleness/in_flight_mean": token_mean - queue_mean,
            "staleness/token_max": max(staleness, default=0),
            **stats.curves,
        }
        if self._peak_flops_per_s is not None:
            peak = config.trainer_processes * self._peak_flops_per_s
            values["throughput/mfu"] = self._flops / (busy_s * peak)
        if not config.emulated:
            values["memory/trainer_peak_gib"] = peak_memory_bytes(self._device) / 2**30
        if self._kl is not None:
            values["policy/train_inference_kl"] = self._kl
        return values

    def _train_inference_kl(self, batch: TrainingBatch, stats: StepStats) -> float | None:
        """Mean train/inference KL (k3) on the same model weights, nats a token; None if not measured.

        It covers tokens of the version just trained on. Without such tokens it covers, every `tracking.table_every`
        steps, a sample of the newest tokens whose version is still stored.
        """
        sharded = self._config.zero_stage == 3  # no rank can hold the whole model
        if stats.train_inference_kl is not None or batch.step % self._config.tracking.table_every or sharded:
            return stats.train_inference_kl
        for number in sorted(set(batch.versions[batch.loss_mask].tolist()), reverse=True):
            try:
                published = weights.read_manifest(weights.version_folder(self._store, number))
                total, tokens = self._engine.train_inference_kl(batch, weights.load(published), number)
            except StorageError:
                continue  # released meanwhile, or version 0, which is a model folder
            if tokens:
                return total / tokens
        return None
