"""The arithmetic of the emulation's benchmark: which steps count, what is made of them, and runs without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.environments.source import open_source
from areal_core.errors import ArealError
from areal_core.models.tokenizer import char_tokenizer
from areal_core.planning.time_model import TimeModel
from benchmarks._emulated_offline import Simulated, fit, overhead_share, simulate, with_overhead
from benchmarks.emulated import PAPER, Measured, first_end, measure, parse, report

LENGTH = 1024  # real tokens of every answer


def config(mode: str, **emulation: Any) -> RunConfig:
    """Two devices, two groups of four answers a step, all of one length."""
    return load(
        {
            "mode": mode,
            "task": {"max_operations": 1, "max_prompt_tokens": 8, "max_new_tokens": 32, "held_out": 16},
            "algorithm": {"group_size": 4},
            "generation": {"engine": "emulated", "slots": 8},
            "rollout": {"batch_size": 8},
            "training": {"engine": "emulated", "minibatches": 1},
            "emulation": {"length_sigma": 0.0, "length_median": float(LENGTH)} | emulation,
        }
    )


def run(tokens_per_s: float, *, step_s: float = 100.0, steps: int = 5) -> Measured:
    return Measured(
        steps=steps,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        trainer_wait=0.5,
        generation_idle=0.1,
        server_cpu=0.04,
        controller_cpu=0.05,
    )


def simulated(tokens_per_s: float, step_s: float) -> Simulated:
    return Simulated(
        step_s=step_s, tokens_per_s=tokens_per_s, generated_tokens_per_s=tokens_per_s, generation_s=1.0, train_s=1.0
    )


def test_the_papers_rows_are_hours_over_steps() -> None:
    steps = {model: (round(row.step_s("sync")), round(row.step_s("async"))) for model, row in PAPER.items()}
    assert steps == {"1.5b": (590, 213), "7b": (831, 366), "14b": (2196, 986), "32b": (3066, 1866)}
    assert [round(row.ratio, 2) for row in PAPER.values()] == [2.77, 2.27, 2.23, 1.64]


@pytest.mark.parametrize("arguments", [["--pairs", "0"], ["--steps", "0"], ["--models", "1.5b,3b"]])
def test_what_can_not_be_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert f"argument {arguments[0]}: must be" in capsys.readouterr().err


def test_overrides_may_stand_anywhere() -> None:
    arguments = parse(["emulation.speed=50", "--models", "7b,32b", "emulation.switch_s=2"])
    assert arguments.overrides == ["emulation.speed=50", "emulation.switch_s=2"]
    assert (arguments.models, arguments.pairs) == (["7b", "32b"], 2)


@pytest.mark.parametrize(
    ("mode", "ends", "first"),
    [
        ("sync", {1: 10.0, 2: 20.0, 3: 30.0}, 1),
        ("async", {1: 10.0, 2: 12.0, 3: 20.0, 4: 30.0}, 1),  # that ended at a third exactly
        ("async", {1: 4.0, 2: 9.0, 3: 13.0, 4: 30.0}, 3),
        ("async", {}, 0),
    ],
)
def test_counting_begins_after_the_first_step_or_a_third(mode: str, ends: Mapping[int, float], first: int) -> None:
    assert first_end(mode, ends) == first


def test_a_run_is_measured_in_emulated_seconds_and_real_tokens() -> None:
    history = {
        "time/elapsed_s": {1: 11.0, 2: 21.0, 3: 31.0},
        "ledger/consumed_tokens": {1: 1000.0, 2: 2500.0, 3: 3000.0},
        "bubble/trainer_wait": {1: 0.0, 2: 0.8, 3: 0.6},
        "bubble/generation_idle": {1: 1.0, 2: 0.2, 3: 0.4},
    }
    found = measure(config("sync", speed=50.0, tokens_per_token=128), history, 0.02, 0.03)
    assert (found.steps, found.step_s) == (2, 500.0)  # 10 s, at 50
    assert found.tokens_per_s == pytest.approx(2000 * 128 / (20 * 50))
    assert (found.trainer_wait, found.generation_idle) == (pytest.approx(0.7), pytest.approx(0.3))
    assert (found.server_cpu, found.controller_cpu) == (0.02, 0.03)
    short = {key: {1: values[1]} for key, values in history.items()}
    with pytest.raises(ArealError, match=r"^--minutes: too short for a step"):
        measure(config("async"), short, 0.0, 0.0)


def test_a_report_holds_measurements_beside_the_model_and_the_paper() -> None:
    pairs = [
        {"sync": run(100.0, step_s=600.0), "async": run(270.123, step_s=220.0, steps=9)},
        {"sync": run(100.0, step_s=610.0), "async": run(290.0, step_s=210.0, steps=8)},
    ]
    found = report({"1.5b": pairs}, {"1.5b": {"sync": simulated(4.0, 590.4), "async": simulated(10.0, 213.0)}})
    assert found["each_ratio"] == {"1.5b": [2.7, 2.9]}
    assert found["ratios"] == {"1.5b": 2.8}
    assert found["simulated_offline_ratios"] == {"1.5b": 2.5}
    assert found["step_s"]["1.5b"] == {
        "sync": {"measured": 605, "simulated_offline": 590, "paper": 590, "steps": [5, 5]},
        "async": {"measured": 215, "simulated_offline": 213, "paper": 213, "steps": [9, 8]},
    }
    assert found["runs"]["1.5b"][0]["async"]["tokens_per_s"] == 270.0


def test_a_synchronous_step_is_generation_training_and_two_switches() -> None:
    """Each of two servers has one group of four answers; all end together, however long the prompts are."""
    given = config("sync", handover_s=50.0)  # which comes with the switch
    model, source = TimeModel(given.emulation), open_source(given, char_tokenizer())
    found = simulate(given)
    prompts = [128 * len(source.prompt(index).token_ids) for index in range(2 * 24)]
    generation_s, train_s = [], []
    for first, second in zip(prompts[::2], prompts[1::2], strict=True):
        each = [model.prefill_s([prompt]) + model.decode_s(4, 4 * prompt, LENGTH) for prompt in (first, second)]
        generation_s.append(max(each))
        lengths = 4 * [first + LENGTH] + 4 * [second + LENGTH]
        train_s.append(model.train_s(lengths, 2))  # no proximal policy: nothing is stale
    assert found.generation_s == pytest.approx(sum(generation_s) / 24)
    assert found.train_s == pytest.approx(sum(train_s) / 24)
    rest_s = 2 * given.emulation.switch_s + model.transfer_s()
    assert found.step_s == pytest.approx(found.generation_s + found.train_s + rest_s)
    assert found.tokens_per_s == pytest.approx(8 * LENGTH / found.step_s)


def test_an_asynchronous_step_takes_as_long_as_what_is_slower() -> None:
    """One device generates, one trains; a training that is slow enough is all that a step takes."""
    found = simulate(config("async", training_share=0.002))
    assert found.step_s == pytest.approx(found.train_s, rel=0.02)
    quick = simulate(config("async"))
    assert quick.train_s < 0.5 * quick.step_s  # waits for the one server that generates
    assert quick.tokens_per_s == pytest.approx(8 * LENGTH / quick.step_s)


def test_overhead_is_told_from_what_is_read() -> None:
    given = config("sync", decode_overhead_s=0.01)
    overhead_s = 0.01 * LENGTH
    assert overhead_share(given) == pytest.approx(overhead_s / simulate(given).generation_s)
    assert overhead_share(with_overhead(given, 0.0)) == pytest.approx(0.0)


def test_a_fit_finds_what_made_the_steps() -> None:
    spread = {"length_sigma": 0.5, "decode_overhead_s": 0.012}
    sync, asynchronous = config("sync", **spread), config("async", **spread)
    batch = {"rollout": {"batch_size": 64}, "training": {"engine": "emulated", "minibatches": 1}}
    sync, asynchronous = (load(given.to_dict() | batch) for given in (sync, asynchronous))
    asynchronous = dataclasses.replace(asynchronous, generation=dataclasses.replace(asynchronous.generation, slots=44))
    sync = dataclasses.replace(sync, generation=asynchronous.generation)
    overhead_s, slots = fit(sync, asynchronous, simulate(sync).step_s, simulate(asynchronous).step_s)
    assert overhead_s == 0.012
    assert slots == pytest.approx(44, abs=2)
