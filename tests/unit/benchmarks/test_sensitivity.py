"""What the sensitivity study varies, and that it fits the overhead again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_core.config.schema import RunConfig
from benchmarks._sensitivity import VARIATIONS, fitted, mean_synchronous_s
from benchmarks.emulated import PAPER, _config

LIMIT = 216 * 128  # real tokens of the longest completion


def arm(model: str, mode: str) -> RunConfig:
    return _config(model, mode, 1, [])


def emulation(config: RunConfig, **values: float) -> RunConfig:
    return replace(config, emulation=replace(config.emulation, **values))


def test_the_first_variation_is_none() -> None:
    assert next(iter(VARIATIONS)) == "as configured"
    assert VARIATIONS["as configured"](arm("7b", "sync")) == arm("7b", "sync")


@pytest.mark.parametrize("name", list(VARIATIONS)[1:])
def test_every_other_variation_changes_a_row(name: str) -> None:
    configs = [arm(model, mode) for model in PAPER for mode in ("sync", "async")]
    assert any(VARIATIONS[name](config) != config for config in configs)


def test_what_is_said_of_one_task_or_mode_changes_no_other() -> None:
    for name in ("code as long as mathematics", "code: rewards_s 9"):
        assert VARIATIONS[name](arm("7b", "sync")) == arm("7b", "sync")
    assert VARIATIONS["three batches in flight"](arm("7b", "sync")) == arm("7b", "sync")
    for name in ("sync: 75 % generate, 25 % train", "sync: all generate, then train"):
        assert VARIATIONS[name](arm("7b", "async")) == arm("7b", "async")


def test_synchronous_devices_are_split_otherwise() -> None:
    three = VARIATIONS["sync: 75 % generate, 25 % train"](arm("1.5b", "sync"))
    assert (three.generation_servers, three.training_ranks, three.takes_turns) == (3, 1, False)
    assert three.generation.slots == 86  # a third of 256
    four = VARIATIONS["sync: all generate, then train"](arm("1.5b", "sync"))
    assert (four.generation_servers, four.training_ranks, four.takes_turns) == (4, 4, True)


def test_an_overhead_by_layers_is_that_of_the_smallest_model_there() -> None:
    vary = VARIATIONS["overhead by layers"]
    base_s = arm("1.5b", "sync").emulation.decode_overhead_s
    assert vary(arm("1.5b", "sync")).emulation.decode_overhead_s == base_s
    assert vary(arm("32b", "sync")).emulation.decode_overhead_s == pytest.approx(base_s * 64 / 28)


def test_the_overhead_is_fitted_to_a_synchronous_step() -> None:
    """Where every completion is as long as the limit, a step is that many decode steps and what is not decoding."""
    config = emulation(arm("1.5b", "sync"), length_sigma=0.0, length_median=2.0 * LIMIT)
    config = replace(config, rollout=replace(config.rollout, batch_size=64))  # that the KV caches hold
    slower = VARIATIONS["bandwidth_share 0.6"]
    overhead_s = fitted(config, slower, 1500.0)
    assert mean_synchronous_s(slower(emulation(config, decode_overhead_s=overhead_s))) == pytest.approx(1500.0)
    assert overhead_s < fitted(config, lambda same: same, 1500.0)
    assert fitted(config, slower, 1.0) == 0.0
