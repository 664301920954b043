"""The arithmetic of benchmarks: what is run, which steps count, what is made of the numbers."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ArealError
from benchmarks import verifiers as benchmark
from benchmarks._mutants import mutants
from benchmarks.emulated import measure
from benchmarks.interruption import window
from benchmarks.trl import CASES, Case, Measurement, grpo_arguments, speedups
from flows.compose import compose


def config(mode: str) -> RunConfig:
    """Two groups of four completions a step."""
    engine = {"engine": "emulated"}
    return load(
        {
            "mode": mode,
            "algorithm": {"group_size": 4},
            "generation": engine,
            "rollout": {"batch_size": 8},
            "training": engine | {"minibatches": 1},
            "emulation": {"speed": 50.0, "tokens_per_token": 128},
        }
    )


def test_a_run_is_measured_in_emulated_seconds_and_real_tokens() -> None:
    history = {
        "time/elapsed_s": {1: 11.0, 2: 21.0, 3: 31.0},
        "completion/tokens_mean": {1: 100.0, 2: 150.0, 3: 100.0, 4: 900.0},  # of a batch of 8
        "bubble/trainer_wait": {1: 0.0, 2: 0.8, 3: 0.6},
        "bubble/generation_idle": {1: 1.0, 2: 0.2, 3: 0.4},
    }
    found = measure(config("sync"), history, 0.02, 0.03)
    assert (found.steps, found.step_s) == (2, 500.0)  # 10 s, at 50
    assert found.tokens_per_s == pytest.approx(2000 * 128 / (20 * 50))
    assert (found.trainer_wait, found.generation_idle) == (pytest.approx(0.7), pytest.approx(0.3))
    assert (found.server_cpu, found.controller_cpu) == (0.02, 0.03)
    short = {key: {1: values[1]} for key, values in history.items()}
    with pytest.raises(ArealError, match=r"^--minutes: too short for a step"):
        measure(config("async"), short, 0.0, 0.0)


def test_a_run_counts_from_its_third_until_nothing_is_admitted() -> None:
    config = load({"training": {"steps": 10}, "rollout": {"max_staleness": 2}})
    ends = {step: float(step) for step in range(1, 11)}
    assert window(config, ends) == (4, 7)  # the version after which nothing is admitted: 7 + 2 + 1 = 10
    assert window(config, {step: ends[step] for step in range(1, 7)}) == (2, 6)
    assert window(config, {}) == (0, 0)


def measurement(step_s: float, *accuracy: float, steps: int = 4) -> Measurement:
    """`steps` steps of equal length; accuracy of the first ones."""
    return Measurement(
        elapsed_s=tuple(step_s * step for step in range(1, steps + 1)), accuracy=dict(enumerate(accuracy, 1))
    )


def test_speedup_is_the_median_of_paired_ratios() -> None:
    measured = {
        1: {"areal": measurement(1.0, 0.8), "trl": measurement(3.0, 0.1, 0.8)},
        2: {"areal": measurement(2.0, 0.8), "trl": measurement(10.0, 0.8)},
        3: {"areal": measurement(1.0, 0.1, 0.8), "trl": measurement(4.0, 0.8)},
    }
    found = speedups(measured, 0.75)
    assert found["speedup_per_step"] == 4.0  # of 3, 5, 4
    assert found["speedup_to_score"] == 5.0  # of 6, 5, 2
    assert (found["interval_to_score"]["low"], found["interval_to_score"]["high"]) == (2.0, 6.0)
    assert found["interval_per_step"]["coverage"] == 0.75


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_trl_makes_as_many_updates_of_as_many_completions(case: Case) -> None:
    config: RunConfig = compose(case.experiment, [f"training.steps={case.steps}"])
    told = grpo_arguments(config, 2, Path("output"))
    a_minibatch = told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] * 2
    assert a_minibatch * config.training.minibatches == config.rollout.batch_size
    assert a_minibatch % told["num_generations"] == 0
    assert told["max_steps"] == case.steps * config.training.minibatches


SOURCE = 'def f(x):\n    """1 + 1"""\n    if x < 2 and not x:\n        return x + 1.5\n    return True\n'
CHANGES = {
    "1:7 x < 2 -> x >= 2",
    "1:7 x < 2 -> x <= 2",
    "1:11 2 -> 3",
    "1:7 x < 2 and (not x) -> x < 2 or not x",
    "1:17 not x -> x",
    "2:15 x + 1.5 -> x - 1.5",
    "2:19 1.5 -> 2.5",
    "3:11 True -> False",
}


def test_mutants_are_all_changes_of_one_operator_behind_the_prompt():
    found = list(mutants(SOURCE, 3, random.Random(1)))
    assert {mutant.change for mutant in found} == CHANGES
    assert len(found) == len(CHANGES) == len({mutant.source for mutant in found})
    assert all(ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE)) for mutant in found)
    assert [mutant.change for mutant in mutants(SOURCE, 3, random.Random(1))] == [mutant.change for mutant in found]


GOLDS = {"one": ["1,234", "-0.75", r"\frac{3}{4}", "3/4", r"3\sqrt{2}", "(1,2)"], "two": ["9"]}


def changed(change, *arguments):
    return [change(gold, *arguments) for gold in GOLDS["one"]]


def test_the_same_answers_are_written_otherwise():
    assert changed(benchmark.decimal_or_fraction) == ["1234.0", r"-\frac{3}{4}", "0.75", "0.75", None, None]
    assert changed(benchmark.thousands) == ["1,234", None, None, None, None, None]
    assert changed(benchmark.dfrac) == [None, None, r"\dfrac{3}{4}", None, None, None]
    assert changed(benchmark.unit)[4:] == [None, None]
    assert changed(benchmark.spacing)[5] == r"(1 ,\, 2)"


def test_wrong_answers_are_none_that_are_right_after_all():
    rng = random.Random(1)
    assert changed(benchmark.inverted, GOLDS, rng) == [None, None, r"\frac{4}{3}", "4/3", None, None]
    assert changed(benchmark.sign, GOLDS, rng)[:4] == ["-1,234", "0.75", r"-\left(\frac{3}{4}\right)", "-3/4"]
    assert all(one in GOLDS["one"] for one in changed(benchmark.another, GOLDS, rng))
    assert benchmark._changed("7.0", "7.") is None
    assert benchmark._changed("7.0", "8") == "8"
