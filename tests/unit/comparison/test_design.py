"""Arms that are compared match in all that must match; a comparison is kept, and continued only by what fits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import char_tokenizer
from flows.comparison.design import DEFAULT_ARMS, Comparison, check_matched, differences, plan_trials, read_comparison
from flows.compose import compose

_EMULATED = {"generation__engine": "emulated", "training__engine": "emulated"}
_TWO = {"sync": ["mode=sync"], "async": ["mode=async"]}


def _config(**dotted: Any) -> RunConfig:
    """A configuration with fields such as rollout__batch_size."""
    values: dict[str, Any] = {}
    for name, value in dotted.items():
        values = merge(values, name.replace("__", "."), value)
    return load(values)


def test_trials_of_a_seed_are_neighbours_and_every_arm_is_first_in_turn() -> None:
    trials = plan_trials("study", "cpu-async", DEFAULT_ARMS, [7, 8, 9, 10, 11])
    arms = list(DEFAULT_ARMS)
    turns = [arms, arms[1:] + arms[:1], arms[2:] + arms[:2], arms[3:] + arms[:3], arms]
    order = [(seed, arm) for seed, turn in zip([7, 8, 9, 10, 11], turns, strict=True) for arm in turn]
    assert [(trial.seed, trial.arm) for trial in trials] == order
    assert [(trial.run_id, trial.config.seed) for trial in trials] == [(f"study.{arm}.s{n}", n) for n, arm in order]
    found = [(trial.config.mode, trial.config.max_staleness) for trial in trials[:4]]
    assert found == [("sync", 0), ("async", 1), ("async", 2), ("async", 4)]


def test_arms_of_a_seed_really_match() -> None:
    trials = plan_trials("study", "cpu-async", DEFAULT_ARMS, [5, 6], ["task.held_out=16"])
    prompts = {}
    for trial in trials:
        source = open_source(trial.config, char_tokenizer())
        shown = tuple(source.prompt(index).text for index in range(50)), tuple(p.text for p in source.held_out())
        prompts.setdefault(trial.seed, set()).add(shown)
    assert [len(of_seed) for of_seed in prompts.values()] == [1, 1]
    (five,), (six,) = prompts.values()
    assert five[0] != six[0]  # the seeds differ in what they train on,
    assert five[1] == six[1]  # not in what they are judged by


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"task__held_out": 512}, "task.held_out must be the same in every arm, got 512, sync has 1024"),
        ({"stop__score": 0.9}, "stop.score must be the same in every arm, got 0.9, sync has None"),
        (
            {"rollout__batch_size": 256},
            "rollout.batch_size * training.steps must be the same in every arm, got 256 * 25, sync has 512 * 25",
        ),
        ({"generation__servers": 3}, "generation.servers must be at most launch.devices (2), got 3"),
        (_EMULATED, "generation.engine must be the same in every arm, got emulated, sync has embedded"),
    ],
)
def test_arms_that_do_not_match_are_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_matched({"sync": _config(), "other": _config(**other)})
    assert str(error.value) == f"arms.other: {said}"


FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]


@pytest.mark.parametrize("experiment", ["paper-1.5b-math", "paper-7b-math", "paper-14b-code", "paper-32b-code"])
def test_the_papers_arms_match(experiment: str) -> None:
    """Table 1. The two differ in how devices are used, and in nothing else."""
    arms = {"sync": [f"experiment={experiment}-sync"], "async": [], "eta-1": ["rollout.max_staleness=1"]}
    sync, own, eta_1 = (trial.config for trial in plan_trials("paper", experiment, arms, [1], FILES))
    assert own == dataclasses.replace(compose(experiment, FILES), seed=1)
    assert (sync.mode, own.mode, eta_1.max_staleness) == ("sync", "async", 1)
    assert {name for name, _, _ in differences(own, sync)} == {
        *("mode", "rollout.max_staleness", "generation.sleep", "training.ranks", "training.hosts")
    }


def test_cores_may_be_shared_and_emulated_devices_may_not() -> None:
    arms = {"sync": ["mode=sync"], "crowded": ["generation.servers=2", "training.ranks=2"]}
    plan_trials("s", "cpu-async", arms, [1])  # confined to two cores, whatever it starts
    said = r"^arms\.crowded: launch\.devices: must be at least 4 where accelerators are"
    with pytest.raises(ConfigError, match=said):
        plan_trials("s", "cpu-async", arms, [1], ["generation.engine=emulated", "training.engine=emulated"])


def test_a_server_of_several_gpus_counts_as_so_many() -> None:
    gpus = {"launch__accelerator": "cuda", "launch__devices": 8, "generation__engine": "vllm"}
    pairs = _config(mode="sync", generation__vllm__tensor_parallel=2, **gpus)
    check_matched({"sync": pairs, "async": _config(generation__vllm__tensor_parallel=2, training__ranks=2, **gpus)})
    weak = dataclasses.replace(pairs, generation=dataclasses.replace(pairs.generation, servers=3))
    with pytest.raises(ConfigError, match=r"^arms\.sync: generation\.servers must be launch\.devices \(8\) / 2 a ser"):
        check_matched({"sync": weak, "async": pairs})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"comparison": "a study"}, "comparison: a name must be letters, digits and single dashes, got 'a study'"),
        ({"comparison": "s" * 61}, f"comparison: a name must have at most 60 characters, got 61: {'s' * 61}"),
        ({"arms": {"sync": []}}, "arms: must be at least 2, got 1"),
        ({"seeds": []}, "seeds: must be at least one"),
        ({"seeds": [1, 2, 1]}, "seeds: must be distinct, got 1, 2, 1"),
        ({"arms": {"a": [], "b": ["seed=3"]}}, "arms.b: seed is chosen by seeds, not by an override"),
        ({"arms": {"a": [], "b": ["training.step=3"]}}, "arms.b: training.step: no such field; did you mean tr"),
        ({"overrides": ["training.step=3"]}, "training.step: no such field"),  # which is no arm's fault
    ],
)
def test_plan_names_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    asked = {"comparison": "s", "experiment": "cpu-async", "arms": _TWO, "seeds": [1], **changed}
    with pytest.raises(ConfigError) as error:
        plan_trials(**asked)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("field", "does"), [("generation.servers", "generates"), ("training.ranks", "trains")])
def test_a_synchronous_reference_uses_every_device(field: str, does: str) -> None:
    weak = {field.replace(".", "__"): 1}
    with pytest.raises(ConfigError) as error:
        check_matched({"sync": _config(mode="sync", **weak), "async": _config()})
    must = f"arms.sync: {field} must be launch.devices (2) in a synchronous reference, so that every device {does}"
    assert str(error.value) == f"{must}, got 1"
    check_matched({"strong": _config(mode="sync"), "weak": _config(mode="sync", **weak)})  # others may be weak,
    check_matched({"async": _config(**weak), "sync": _config(mode="sync")})  # and so may what is no baseline,
    check_matched({"sync": _config(mode="sync", **weak, **_EMULATED), "async": _config(**_EMULATED)})  # or emulated


def _comparison(**changed: Any) -> Comparison:
    arms = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}
    values = {"experiment": "cpu-async", "arms": arms, "seeds": [1, 2], "overrides": ["training.steps=10"]}
    return Comparison(name="study", **values | changed)


def test_comparison_is_written_read_and_continued(tmp_path: Path) -> None:
    comparison = _comparison(overrides=[f"state_dir={tmp_path}"])
    assert comparison.folder() == tmp_path / "comparisons" / "study"
    assert read_comparison(comparison.folder()) is None
    comparison.write()
    assert read_comparison(comparison.folder()) == comparison
    more = {"async-4": ["mode=async", "rollout.max_staleness=4"], "sync": ["mode=sync"]}
    asked = _comparison(arms=more, seeds=[3, 1])
    joined = asked.continuing(_comparison())
    assert (list(joined.arms), joined.seeds) == (["sync", "async-1", "async-4"], [1, 2, 3])
    assert joined.continuing(joined) == joined


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"experiment": "cpu-sync"}, "experiment: must be 'cpu-async' as when comparison study was started"),
        ({"overrides": []}, "overrides: must be ['training.steps=10'] as when comparison study was started, got []"),
        ({"arms": {"sync": []}}, "arms.sync: must be ['mode=sync'] as when comparison study was started, got []"),
    ],
)
def test_what_was_decided_stays(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _comparison(**changed).continuing(_comparison())
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"experiment": "cpu-as', '{"experiment": "cpu-async"}', "[]"])
def test_damaged_plan_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^comparison: .*plan\.json is damaged") as caught:
        read_comparison(tmp_path)
    assert "\n" not in str(caught.value)
