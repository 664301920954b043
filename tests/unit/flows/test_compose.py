"""Every experiment composes; everything that can be wrong with overrides or benchmarks is one line that names it; the
form of the flow's parameters as Prefect shows it, what they mean, and what flow runs are called."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ModelError
from flows.areal import areal
from flows.compose import benchmark_configs, compose, configure, experiments, split_experiment
from flows.shared import run_title

FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]  # what only the user can know
WITH_FILES = [name for name in experiments() if name.startswith(("gpu-", "paper-"))]


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_composes_under_its_own_name(experiment: str) -> None:
    config = compose(experiment, FILES if experiment in WITH_FILES else [])
    assert config.label in (experiment, f"{experiment}-{config.mode}")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_papers_runs_have_the_papers_settings(mode: str) -> None:
    """Tables 1 and 3 of the paper. In synchronous mode all GPUs generate, then all train."""
    config = compose("paper-7b-math" if mode == "async" else "paper-7b-math-sync", FILES)
    algorithm, training, task, machines = config.algorithm, config.training, config.task, 24
    if mode == "async":
        assert (config.max_staleness, config.interruption, config.sleeps) == (8, "recompute", False)
        assert config.generation_servers * config.devices_per_server == 6 * machines  # 75 %
        assert (training.ranks, training.hosts) == (2 * machines, machines // 4)
    else:
        assert (config.max_staleness, config.interruption, config.sleeps) == (0, "wait", True)
        assert config.generation_servers * config.devices_per_server == training.ranks == 8 * machines
    assert (config.rollout.batch_size, algorithm.group_size, training.minibatches) == (512 * 16, 16, 4)
    assert (config.launch.devices, config.launch.devices_per_host, training.steps) == (8 * machines, 8, 250)
    assert (task.max_prompt_tokens, task.max_new_tokens, training.microbatch_tokens) == (1024, 27648, 32768)
    assert (algorithm.objective, algorithm.advantage, algorithm.clip_eps) == ("decoupled", "batch", 0.2)
    assert (algorithm.reward_correct, algorithm.reward_incorrect) == (5.0, -5.0)
    assert (training.learning_rate, training.weight_decay, training.warmup_steps) == (2e-5, 0.05, 1)
    assert (training.beta1, training.beta2, training.adam_eps, training.grad_clip) == (0.9, 0.95, 1e-5, 1.0)
    assert (training.engine, training.zero_stage, training.dtype) == ("deepspeed", 3, "bfloat16")


def test_default_experiment_is_the_schema_itself() -> None:
    assert compose("cpu-async") == RunConfig()
    assert compose("cpu-sync") == dataclasses.replace(RunConfig(), mode="sync")


@pytest.mark.parametrize(
    ("override", "start", "hint"),
    [
        ("training.stepz=3", "training.stepz: no such field", "did you mean training.steps?"),
        ("training.steps=many", "training.steps: must be a whole number", "'many'"),
        ("training.steps=0", "training.steps: must be at least 1", "got 0"),
        ("training.steps=1,2", "training.steps: must be one value", "1,2"),
        ("rollout.batch_size=100", "rollout.batch_size: must be a multiple of algorithm.group_size", "100"),
        ("training.ranks=129", "training.ranks: must be at most 128, the completions in a minibatch, got 129", ""),
        ("algorithm=standar", "algorithm: must be one of a3po, cispo, dapo, decoupled, ", "did you mean standard?"),
        ("generation.transfer=files", "generation.transfer: no such field", "known fields: "),
        ("model=folder", "model.path: must be given", "model.path=VALUE"),
        ("launch=3", "launch: expected a group of fields", "3"),
        ("~training.steps", "overrides: must be of the form field=value, got '~training.steps'", ""),
        ("training.steps=[1", "overrides: must be of the form field=value, got 'training.steps=[1'", ""),
        ("name=${nowhere}", "overrides:", "nowhere"),
        ("", "overrides: must be of the form field=value, got ''", ""),
        ("experiment=cpu-sync", "experiment: must not be in overrides; set the parameter experiment", ""),
    ],
)
def test_wrong_override_is_one_line_that_names_the_field(override: str, start: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("cpu-async", [override])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(start)
    assert hint in message


def test_each_benchmark_is_a_task_and_its_held_out_prompts():
    configs = benchmark_configs("m.gguf", ["needle", "rows=it's.jsonl"], samples=4, seed=7)
    assert list(configs) == ["needle", "rows"]
    needle, rows = configs.values()
    assert (needle.task.dataset, needle.model.path) == ("needle_haystack", "m.gguf")
    assert (needle.evaluation.samples, needle.seed) == (4, 7)
    assert (rows.task.name, rows.task.path, rows.task.held_out_path) == ("rows", None, "it's.jsonl")
    assert all(config.mode == "sync" and config.generation_servers == 2 for config in configs.values())


def test_the_name_of_a_run_is_its_final_model(tmp_path):
    final = tmp_path / "runs" / "first" / "final"
    final.mkdir(parents=True)
    for model, path in (("first", str(final)), ("second", "second"), ("x" * 300, "x" * 300)):
        [config] = benchmark_configs(model, ["needle"], overrides=[f"state_dir={tmp_path}"]).values()
        assert config.model.path == path
    final.with_name("config.json").touch()
    final.rmdir()
    with pytest.raises(ModelError, match=r"^model\.path: run first has no final model"):
        benchmark_configs("first", ["needle"], overrides=[f"state_dir={tmp_path}"])


@pytest.mark.parametrize(
    ("benchmarks", "told"),
    [
        ([], r"benchmarks: must name at least one, such as gsm8k"),
        (["needle", "needle"], r"benchmarks: names must be distinct, got needle twice"),
        (["needles"], r"task: 'needles' .*did you mean needle\?|task: .*needle"),
    ],
)
def test_what_is_wrong_is_named(benchmarks, told):
    with pytest.raises(ConfigError, match=f"^({told})"):
        benchmark_configs("m", benchmarks)


def test_form_offers_choices_and_bounds_and_explains_every_field() -> None:
    schema = parameter_schema(areal)
    form = schema.model_dump()["properties"]

    def field(name: str) -> dict[str, Any]:
        return next(choice for choice in form[name]["anyOf"] if choice["type"] != "null")

    assert (form["experiment"]["enum"], form["experiment"]["default"]) == (experiments(), "cpu-async")
    assert field("mode")["enum"] == ["async", "sync"]
    assert field("provision")["enum"] == ["local", "static", "aws"]
    assert (field("seed")["minimum"], field("steps")["minimum"]) == (0, 1)
    assert (field("stop_at_score")["minimum"], field("stop_at_score")["maximum"]) == (0.0, 1.0)
    assert field("stop_after_minutes")["exclusiveMinimum"] == 0.0
    assert all(each["description"] for each in form.values())
    assert not schema.required


def test_parameters_reach_their_fields_and_win_over_overrides() -> None:
    overrides = ["model.layers=2", "training.steps=9", "mode=async"]
    limits = {"stop_at_score": 0.5, "stop_after_minutes": 2}
    config = configure("cpu-sync", seed=7, steps=3, mode="sync", overrides=overrides, **limits)
    assert (config.name, config.mode, config.seed, config.training.steps) == ("cpu", "sync", 7, 3)
    assert (config.stop.score, config.stop.minutes, config.model.layers) == (0.5, 2.0, 2)
    with pytest.raises(ConfigError, match=r"^training\.steps: must be at least 1, got 0$"):
        configure(steps=0)


def test_mixture_composes_from_an_experiment_and_from_overrides() -> None:
    config = compose("cpu-mixed", ["tasks.tools.ratio=5", "+tasks.words.task.max_operations=3"])
    assert {name: each.ratio for name, each in config.tasks.items()} == {"direct": 2, "tools": 5, "words": 1}
    assert config.tasks["tools"] == dataclasses.replace(compose("cpu-mixed").tasks["tools"], ratio=5)
    assert config.tasks["words"].task == dataclasses.replace(RunConfig().task, max_operations=3)


def test_flow_run_is_named_after_what_was_chosen() -> None:
    chosen = {"experiment": "cpu-async", "mode": "sync", "seed": 0, "steps": None, "overrides": ["training.steps=2"]}
    assert run_title(chosen) == "cpu-async: mode sync, seed 0, training.steps=2"
    compared = {"experiment": "cpu-async", "arms": {"sync": ["mode=sync"], "async": []}, "seeds": [1, 2], "name": None}
    assert run_title(compared) == "cpu-async: arms sync async, seeds 1 2"


def test_an_experiment_of_the_users_is_a_file(tmp_path: Path) -> None:
    """Its settings come before the others of the command line."""
    file = tmp_path / "own.yaml"
    file.write_text(
        "experiment: cpu-sync\ndefaults:\n  - override /environment: calculator\n  - _self_\n"
        'name: own\ntraining: {steps: 7, minibatches: 2}\nmodel: {path: "it\'s, a"}\n'
    )
    experiment, settings = split_experiment([f"experiment={file}", "training.steps=9"])
    assert experiment == "cpu-sync"
    assert run_title({"experiment": experiment, "overrides": settings}).startswith("own: environment=calculator, ")
    found = compose(experiment, settings)
    assert (found.name, found.training.steps, found.training.minibatches) == ("own", 9, 2)
    assert (found.environment.name, found.model.path) == ("calculator", "it's, a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "experiment: can't read .*: No such file or directory"),
        ("- a", "experiment: .* must be a mapping of fields to values"),
        ("a: [", "experiment: can't read .*"),
        ("defaults: [task: rows]", "experiment: .*: defaults must be of the form 'override /GROUP: OPTION', got .*"),
        ("experiment: none", "experiment: .*: must build on one of cpu-async, .*, got 'none'"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_in_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{said}$"):
        split_experiment([f"experiment={tmp_path}/own.yaml"])
