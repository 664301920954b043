"""Every experiment composes, and everything that can be wrong with an override is one line that names the field."""

import dataclasses

import pytest

from areal_core.config import RunConfig
from areal_core.errors import ConfigError
from flows.compose import CONF, compose, experiments


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_composes_under_its_own_name(experiment: str) -> None:
    config = compose(experiment)
    assert config.label in (experiment, f"{experiment}-{config.mode}")


def test_default_experiment_is_the_schema_itself() -> None:
    assert compose("cpu-async") == RunConfig()


def test_synchronous_experiment_differs_only_in_mode() -> None:
    assert compose("cpu-sync") == dataclasses.replace(RunConfig(), mode="sync")


def test_every_group_named_by_the_design_has_a_choice() -> None:
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert groups == {
        *(
            "model",
            "task",
            "algorithm",
            "generation",
            "training",
            "storage",
            "tracking",
            "infra",
            "experiment",
            "emulation",
        )
    }


@pytest.mark.parametrize(
    ("override", "look"),
    [
        ("training.steps=7", lambda c: c.training.steps == 7),
        ("stop.score=0.7", lambda c: c.stop.score == 0.7),
        ("stop.score=null", lambda c: c.stop.score is None),
        ("algorithm=naive", lambda c: c.algorithm.objective == "naive"),
        ("training=paper", lambda c: c.training.learning_rate == 2e-5),
        ("generation=deterministic", lambda c: c.generation.deterministic),
        ("tracking=off", lambda c: not c.tracking.enabled),
        ("infra=local", lambda c: c.launch.devices == 2),
        ("launch.devices=4", lambda c: c.launch.devices == 4),
        ("seed=9", lambda c: c.seed == 9),
        ("storage.url=s3://bucket/prefix", lambda c: c.storage.url == "s3://bucket/prefix"),
        ("tracking.uri='http://127.0.0.1:5000'", lambda c: c.tracking.uri == "http://127.0.0.1:5000"),
    ],
)
def test_override_reaches_its_field(override: str, look) -> None:
    assert look(compose("cpu-async", [override]))


def test_later_override_wins() -> None:
    assert compose("cpu-async", ["training.steps=7", "training.steps=8"]).training.steps == 8


def test_value_beats_group_whatever_their_order() -> None:
    config = compose("cpu-async", ["training.steps=3", "training=paper"])
    assert (config.training.steps, config.training.weight_decay) == (3, 0.05)


@pytest.mark.parametrize(
    ("override", "start", "hint"),
    [
        ("training.stepz=3", "training.stepz: no such field", "did you mean training.steps?"),
        ("trainin.steps=3", "trainin: no such field", "did you mean training?"),
        ("training.steps=many", "training.steps: must be a whole number", "'many'"),
        ("training.steps=0", "training.steps: must be at least 1", "got 0"),
        ("training.steps=1,2", "training.steps: must be one value", "1,2"),
        ("training.steps.more=1", "", "training.steps"),
        ("rollout.batch_size=100", "rollout.batch_size: must be a multiple of algorithm.group_size", "100"),
        ("mode=both", "mode: must be one of async, sync", "'both'"),
        ("algorithm=naiv", "algorithm: must be one of decoupled, naive", "did you mean naive?"),
        ("model=folder", "model.path: must be given", "model.path=VALUE"),
        ("storage=s3", "storage.url: must be given", ""),
        ("task=jsonl", "task.path: must be given", ""),
        ("launch=3", "launch: expected a group of fields", "3"),
        ("training=[1]", "training: must be one of cpu, paper", "[1]"),
        ("~training.steps", "overrides: '~training.steps' must be of the form", ""),
        ("+training.extra=1", "overrides: '+training.extra=1' must be of the form", ""),
        ("training.steps", "overrides: 'training.steps' is not of the form", ""),
        ("training.steps=[1", "overrides: 'training.steps=[1' is not of the form", ""),
        ("name=${nowhere}", "overrides:", "nowhere"),
        ("", "overrides: '' is not of the form", ""),
        ("experiment=cpu-sync", "experiment: is chosen by its own parameter", ""),
    ],
)
def test_wrong_override_is_one_line_that_names_the_field(override: str, start: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("cpu-async", [override])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(start)
    assert hint in message


def test_unknown_experiment_lists_the_known_ones() -> None:
    message = r"^experiment: must be one of cpu-async, cpu-sync, [^']*got 'cpu-asinc'; did you"
    with pytest.raises(ConfigError, match=message):
        compose("cpu-asinc")
