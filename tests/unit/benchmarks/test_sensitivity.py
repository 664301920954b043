"""The sensitivity study fits the decoding overhead again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_core.config.schema import RunConfig
from benchmarks._sensitivity import VARIATIONS, fitted, mean_synchronous_s
from benchmarks.emulated import _config

LIMIT = 216 * 128  # real tokens of the longest completion


def arm(model: str, mode: str) -> RunConfig:
    return _config(model, mode, 1, [])


def emulation(config: RunConfig, **values: float) -> RunConfig:
    return replace(config, emulation=replace(config.emulation, **values))


def test_the_overhead_is_fitted_to_a_synchronous_step() -> None:
    """Where every completion is as long as the limit, a step is that many decode steps and what is not decoding."""
    config = emulation(arm("1.5b", "sync"), length_sigma=0.0, length_median=2.0 * LIMIT)
    config = replace(config, rollout=replace(config.rollout, batch_size=64))  # that the KV caches hold
    slower = VARIATIONS["bandwidth_share 0.6"]
    overhead_s = fitted(config, slower, 1500.0)
    assert mean_synchronous_s(slower(emulation(config, decode_overhead_s=overhead_s))) == pytest.approx(1500.0)
    assert overhead_s < fitted(config, lambda same: same, 1500.0)
    assert fitted(config, slower, 1.0) == 0.0
