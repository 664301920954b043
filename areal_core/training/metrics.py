"""What a training step tells of itself, by the names that docs/metrics.md explains."""

from __future__ import annotations

from collections import Counter

from areal_core.training.engines.engine import StepStats
from areal_core.types import BatchManifest


def step_metrics(
    manifest: BatchManifest, stats: StepStats, staleness: Counter[int], mismatch: float | None
) -> dict[str, float]:
    """Points of one step's curves. staleness: sampled tokens of the batch by their staleness, versions. mismatch: k3 of
    trainer against generator, nats; None where it was not measured."""
    token_mean = sum(lag * count for lag, count in staleness.items()) / max(staleness.total(), 1)
    sampled = sum(sum(group.lengths) for group in manifest.groups)
    queued = sum(sum(group.lengths) * (manifest.step - 1 - group.ready_version) for group in manifest.groups)
    values: dict[str, float] = {
        "loss/policy": stats.loss,
        "optimizer/grad_norm": stats.grad_norm,
        "optimizer/update_norm": stats.update_norm,
        "optimizer/learning_rate": stats.learning_rate,
        "optimizer/skipped_updates": stats.skipped,
        "staleness/token_mean": token_mean,
        "staleness/queue_mean": queued / sampled,
        "staleness/in_flight_mean": token_mean - queued / sampled,
        "staleness/token_max": max(staleness, default=0),
    }
    if stats.trained_tokens:
        values |= {
            "loss/clip_fraction": stats.clip_fraction,
            "loss/clip_low_fraction": stats.clip_low_fraction,
            "loss/clip_high_fraction": stats.clip_high_fraction,
            "loss/cap_fraction": stats.cap_fraction,
            "loss/mask_fraction": stats.mask_fraction,
            "loss/approx_kl": stats.approx_kl,
            "loss/reference_kl": stats.reference_kl,
            "policy/entropy": stats.entropy,
            "policy/ess": stats.ess,
            "policy/importance_weight_p01": stats.weight_p01,
            "policy/importance_weight_p50": stats.weight_p50,
            "policy/importance_weight_p99": stats.weight_p99,
            "policy/importance_weight_max": stats.weight_max,
        }
    if mismatch is not None:
        values["mismatch/k3"] = mismatch
    return values
