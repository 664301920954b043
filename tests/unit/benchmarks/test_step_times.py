"""Steps in virtual time, against the time model where they can be said by hand: completions of one length."""

from __future__ import annotations

from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.planning.time_model import TimeModel
from benchmarks._step_times import asynchronous_s, synchronous_s

LENGTH = 1024  # real tokens of every completion
PROMPT = 4 * 128


def config(mode: str, staleness: int, *, devices: int = 2, slots: int = 8, **emulation: Any) -> RunConfig:
    """Two groups of four completions a step, on one server and one rank unless they share the devices."""
    return load(
        {
            "mode": mode,
            "task": {"max_operations": 1, "max_prompt_tokens": 8, "max_new_tokens": 32, "held_out": 16},
            "algorithm": {"group_size": 4},
            "generation": {"engine": "emulated", "slots": slots, "servers": 1},
            "rollout": {"batch_size": 8, "max_staleness": staleness},
            "training": {"engine": "emulated", "minibatches": 1, "ranks": 1},
            "launch": {"devices": devices},
            "emulation": {"length_sigma": 0.0, "length_median": float(LENGTH)} | emulation,
        }
    )


def generation_s(model: TimeModel, prefills: int) -> float:
    return model.prefill_s([PROMPT] * prefills) + model.decode_s(8, 8 * PROMPT, LENGTH)


def training_s(model: TimeModel) -> float:
    return model.train_s([PROMPT + LENGTH] * 8, 1)


def test_a_synchronous_step_is_one_thing_after_the_other() -> None:
    apart = config("sync", 0, rewards_s=30.0, handover_s=2.0)
    model = TimeModel(apart.emulation)
    expected_s = generation_s(model, prefills=2) + 30.0 + training_s(model) + model.transfer_s()
    assert synchronous_s(apart) == pytest.approx(expected_s + 2.0)
    assert synchronous_s(config("sync", 0, devices=1, rewards_s=30.0, switch_s=7.0)) == pytest.approx(expected_s + 14.0)


def test_the_slower_of_the_two_sets_an_asynchronous_step() -> None:
    training = config("async", 4, training_share=1e-3)
    assert asynchronous_s(training) == pytest.approx(training_s(TimeModel(training.emulation)))
    generating = config("async", 4, handover_s=0.0, prefill_share=1.0)
    model = TimeModel(generating.emulation)
    assert training_s(model) < 0.2 * generation_s(model, 8)
    assert asynchronous_s(generating) == pytest.approx(generation_s(model, 8), rel=0.02)  # and recomputation
