"""Arms that are compared match in all that must match; a comparison is kept, and continued only by what fits; a trial's
result is what its run left in its folder; the comparison's own run in MLflow is opened once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.environments.source import open_source
from areal_core.errors import ArealError, ConfigError, ProcessError
from areal_core.models.tokenizer import char_tokenizer
from areal_core.run.launcher import read_summary, run_folder
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow, RunSummary
from flows.comparison.design import DEFAULT_ARMS, Comparison, Trial, check_matched, differences, read_comparison
from flows.comparison.parent import Parent, open_parent
from flows.comparison.trials import TrialResult, load_result, run_trial
from flows.compose import compose
from tests.support.comparison import made_up

_EMULATED = {"generation__engine": "emulated", "training__engine": "emulated"}
_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}


def _config(**dotted: Any) -> RunConfig:
    """A configuration with fields such as rollout__batch_size."""
    values: dict[str, Any] = {}
    for name, value in dotted.items():
        values = merge(values, name.replace("__", "."), value)
    return load(values)


def test_trials_of_a_seed_are_neighbours_and_every_arm_is_first_in_turn() -> None:
    trials = Comparison("study", "cpu-async", DEFAULT_ARMS, [7, 8, 9, 10, 11]).trials()
    arms = list(DEFAULT_ARMS)
    turns = [arms, arms[1:] + arms[:1], arms[2:] + arms[:2], arms[3:] + arms[:3], arms]
    order = [(seed, arm) for seed, turn in zip([7, 8, 9, 10, 11], turns, strict=True) for arm in turn]
    assert [(trial.seed, trial.arm) for trial in trials] == order
    assert [(trial.run_id, trial.config.seed) for trial in trials] == [(f"study.{arm}.s{n}", n) for n, arm in order]
    found = [(trial.config.mode, trial.config.max_staleness) for trial in trials[:4]]
    assert found == [("sync", 0), ("async", 1), ("async", 2), ("async", 4)]


def test_arms_of_a_seed_really_match() -> None:
    trials = Comparison("study", "cpu-async", DEFAULT_ARMS, [5, 6], ["task.held_out=16"]).trials()
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
        ({"task__held_out": 512}, "task.held_out must be 1024 as in sync, got 512"),
        ({"rollout__batch_size": 256}, "rollout.batch_size * training.steps must be 512 * 25 as in sync, got 256 * 25"),
        ({"generation__servers": 3}, "generation.servers must be at most 2 (launch.devices=2), got 3"),
        (_EMULATED, "generation.engine must be embedded as in sync, got emulated"),
    ],
)
def test_arms_that_do_not_match_are_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_matched({"sync": _config(), "other": _config(**other)})
    assert str(error.value).startswith(f"arms.other: {said}")


FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]


@pytest.mark.parametrize("experiment", ["paper-1.5b-math", "paper-7b-math", "paper-14b-code", "paper-32b-code"])
def test_the_papers_arms_match(experiment: str) -> None:
    """Table 1. The two differ in how devices are used, and in nothing else."""
    arms = {"sync": [f"experiment={experiment}-sync"], "async": [], "eta-1": ["rollout.max_staleness=1"]}
    sync, own, eta_1 = (trial.config for trial in Comparison("paper", experiment, arms, [1], FILES).trials())
    assert own == dataclasses.replace(compose(experiment, FILES), seed=1)
    assert (sync.mode, own.mode, eta_1.max_staleness) == ("sync", "async", 1)
    assert {name for name, _, _ in differences(own, sync)} == {
        *("mode", "rollout.max_staleness", "generation.sleep", "training.ranks", "training.hosts")
    }


def test_cores_may_be_shared_and_emulated_devices_may_not() -> None:
    arms = {"sync": ["mode=sync"], "crowded": ["generation.servers=2", "training.ranks=2"]}
    Comparison("s", "cpu-async", arms, [1]).trials()  # confined to two cores, whatever it starts
    said = r"^arms\.crowded: launch\.devices: must be at least 4 where accelerators are"
    with pytest.raises(ConfigError, match=said):
        Comparison("s", "cpu-async", arms, [1], ["generation.engine=emulated", "training.engine=emulated"]).trials()


def test_a_server_of_several_gpus_counts_as_so_many() -> None:
    gpus = {"launch__accelerator": "cuda", "launch__devices": 8, "generation__engine": "vllm"}
    pairs = _config(mode="sync", generation__vllm__tensor_parallel=2, **gpus)
    check_matched({"sync": pairs, "async": _config(generation__vllm__tensor_parallel=2, training__ranks=2, **gpus)})
    weak = dataclasses.replace(pairs, generation=dataclasses.replace(pairs.generation, servers=3))
    with pytest.raises(ConfigError, match=r"^arms\.sync: generation\.servers must be 4 \(launch\.devices=8 / 2 dev"):
        check_matched({"sync": weak, "async": pairs})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "a study"}, "comparison: a name must be letters, digits and single dashes, got 'a study'"),
        ({"name": "s" * 61}, f"comparison: a name must have at most 60 characters, got 61: {'s' * 61}"),
        ({"arms": {"sync": []}}, "arms: must name at least 2 arms to compare, got 1; define another"),
        ({"seeds": []}, "seeds: must list at least one seed, as in seed=1,2,3, got none"),
        ({"seeds": [1, 2, 1]}, "seeds: must be distinct, got 1, 2, 1"),
        ({"arms": {"a": [], "b": ["seed=3"]}}, "arms.b: must not set seed; set it in seeds"),
        ({"arms": {"a": [], "b": ["training.step=3"]}}, "arms.b: training.step: no such field; did you mean tr"),
        ({"overrides": ["training.step=3"]}, "training.step: no such field"),  # which is no arm's fault
    ],
)
def test_plan_names_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"name": "s", "experiment": "cpu-async", "arms": _ARMS, "seeds": [1], **changed}
    with pytest.raises(ConfigError) as error:
        Comparison(**asked).trials()
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("field", "does"), [("generation.servers", "generate"), ("training.ranks", "train")])
def test_a_synchronous_reference_uses_every_device(field: str, does: str) -> None:
    weak = {field.replace(".", "__"): 1}
    with pytest.raises(ConfigError) as error:
        check_matched({"sync": _config(mode="sync", **weak), "async": _config()})
    why = f"because a synchronous reference arm must {does} on every device"
    assert str(error.value) == f"arms.sync: {field} must be 2 (launch.devices=2), {why}, got 1"
    check_matched({"strong": _config(mode="sync"), "weak": _config(mode="sync", **weak)})  # others may be weak,
    check_matched({"async": _config(**weak), "sync": _config(mode="sync")})  # and so may what is no baseline,
    check_matched({"sync": _config(mode="sync", **weak, **_EMULATED), "async": _config(**_EMULATED)})  # or emulated


def _comparison(**changed: Any) -> Comparison:
    values = {"experiment": "cpu-async", "arms": _ARMS, "seeds": [1, 2], "overrides": ["training.steps=10"]}
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
        ({"experiment": "cpu-sync"}, "experiment: must be 'cpu-async' as in the existing comparison study"),
        ({"overrides": []}, "overrides: must be ['training.steps=10'] as in the existing comparison study, got []"),
        ({"arms": {"sync": []}}, "arms.sync: must be ['mode=sync'] as in the existing comparison study, got []"),
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


class Runs:
    """In place of `areal_core.run.launcher.execute`: leaves what a run leaves, or fails."""

    def __init__(self, trials: list[Trial], failing: Mapping[str, ArealError] | None = None) -> None:
        self._made_up = {trial.run_id: made_up(trial).summary for trial in trials}
        self._failing = failing or {}
        self.calls: list[tuple[str, Mapping[str, str]]] = []

    def __call__(self, config: RunConfig, *, run_id: str, tags: Mapping[str, str], **options: Any) -> RunSummary:
        self.calls.append((run_id, tags))
        run = RunDir.create(config, RunInfo(run_id=run_id, model_path="m", checkpoint_url="c"))
        with contextlib.closing(Outbox(run.outbox, run_id)) as outbox:
            outbox.log([MetricRow(key="reward/mean", step=step, value=0.1 * step, time_s=1.0) for step in (2, 1)])
        if error := self._failing.get(run_id):
            raise error
        summary = self._made_up[run_id]
        assert summary is not None
        write_json(run.summary, dataclasses.asdict(summary))
        return read_summary(run)


def _trials(state: Path) -> list[Trial]:
    return Comparison("t", "cpu-async", _ARMS, [1, 2], [f"state_dir={state}"]).trials()


def test_result_is_what_the_run_left(tmp_path: Path) -> None:
    trials = _trials(tmp_path)
    runs = Runs(trials)
    result = run_trial(trials[0], tags={"comparison": "t"}, log=print, execute=runs)
    assert runs.calls == [("t.sync.s1", {"arm": "sync", "comparison": "t"})]
    assert result.failure is None
    assert result.summary is not None
    assert result.summary.run_id == "t.sync.s1"
    assert result.curves == {"reward/mean": [(1, 0.1), (2, 0.2)]}
    assert load_result(trials[0]) == result


def test_failed_trial_is_a_result_and_the_next_one_runs(tmp_path: Path) -> None:
    trials = _trials(tmp_path)
    died, refused = ProcessError("trainer-0 exited\nwith code 3"), ConfigError("state_dir: can't write to it")
    runs = Runs(trials, failing={"t.async-1.s1": died, "t.sync.s2": refused})
    results = [run_trial(trial, log=print, execute=runs) for trial in trials]
    assert [run_id for run_id, _ in runs.calls] == ["t.sync.s1", "t.async-1.s1", "t.async-1.s2", "t.sync.s2"]
    failed = results[1]
    assert failed.failure == "trainer-0 exited with code 3"
    assert failed.summary is None
    assert failed.curves["reward/mean"] == [(1, 0.1), (2, 0.2)]  # as far as it came
    assert [result.summary is not None for result in results] == [True, False, True, False]


def test_finished_run_must_be_what_is_planned(tmp_path: Path) -> None:
    [made, *_] = _trials(tmp_path)
    assert load_result(made).failure == "the run has not finished: it has no summary"
    assert not run_folder(made.config, "t.sync.s1").root.exists()  # a look leaves nothing behind
    run_trial(made, log=print, execute=Runs([made]))

    def found(*overrides: str) -> TrialResult:
        return load_result(Comparison("t", "cpu-async", _ARMS, [1], [f"state_dir={tmp_path}", *overrides]).trials()[0])

    other = found("stop.minutes=3")
    assert other.failure == "stop.minutes: must be 3.0 as planned, but the finished run t.sync.s1 has None"
    assert other.summary is None
    assert found("storage.url=/elsewhere", "tracking=off").summary is not None


def _open(folder: Path, seeds: Sequence[int] = (1, 2), *overrides: str) -> Parent | None:
    comparison = _comparison(seeds=seeds, overrides=[f"state_dir={folder}", *overrides])
    comparison.write()
    return open_parent(comparison, comparison.trials(), {"areal.flow_run_id": "f"})


def _remembered(folder: Path) -> Path:
    return folder / "comparisons" / "study" / "tracking.json"


@pytest.fixture(autouse=True)
def _sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_parent_is_opened_once_and_found_again_with_what_was_added(tmp_path: Path) -> None:
    parent = _open(tmp_path)
    assert parent is not None
    assert parent.places([]) == {"MLflow": parent.uri}  # a database has no pages
    parent.add({"comparison/async-1.wall_time.ratio": 0.5}, 4, [_remembered(tmp_path)])
    parent.end("KILLED")
    assert _open(tmp_path, [1, 2, 3]) == parent

    client = MlflowClient(parent.uri)
    run = client.get_run(parent.run_id)
    assert (run.info.run_name, run.info.status) == ("study", "RUNNING")
    tags = {"comparison": "study", "experiment": "cpu-async", "areal.flow_run_id": "f"}
    assert run.data.tags.items() >= (tags | {"seeds": "1, 2, 3", "arms": "sync, async-1"}).items()
    assert [file.path for file in client.list_artifacts(parent.run_id, "report")] == ["report/tracking.json"]
    kept = json.loads(Path(client.download_artifacts(parent.run_id, "config.json", str(tmp_path))).read_text())
    assert kept["seeds"] == "1, 2, 3"
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_untracked_comparison_has_no_parent(tmp_path: Path) -> None:
    assert _open(tmp_path, [1], "tracking=off") is None
    assert not _remembered(tmp_path).exists()
