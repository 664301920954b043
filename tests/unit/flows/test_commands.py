"""The commands `areal plan`, `advise`, `train`, `prune` and `compare`: what they take, print and refuse."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_core.config.schema import load
from areal_core.errors import ConfigError, StorageError
from areal_core.planning.footprint import check_footprint
from areal_core.run.prune import State, StoredRun
from flows import cli, watch
from flows.commands import advise, plan, prune, train
from flows.commands.compare import parameters
from flows.comparison.design import Comparison
from flows.compose import compose, experiments
from tests.support.splits import recorded_run


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  areal {name}" in capsys.readouterr().out


def test_a_command_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    said = "areal: error: unknown command 'trian'; did you mean train? `areal --help` lists all commands\n"
    assert capsys.readouterr().err == said


def test_the_configuration_is_printed_and_nothing_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "experiment=cpu-tools", "training.steps=7", "--cfg", "job"]) == 0
    assert load(yaml.safe_load(capsys.readouterr().out)) == compose("cpu-tools", ["training.steps=7"])


def test_a_sweep_trains_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(watch, "run_command", lambda _name, _deployment, chosen: started.append(chosen()))
    cli.main(["train", "-m", "algorithm=grpo,gspo", "training.learning_rate=1e-3,0.002", "seed=1,2", "--name", "s"])
    cli.main(["train", "-m", "seed=1,2,3", "mode=sync"])
    trials = Comparison(**started[0]).trials()
    found = {(trial.arm, trial.seed, trial.config.algorithm.objective) for trial in trials}
    assert len(found) == len({trial.run_id for trial in trials}) == 8
    rates = {trial.arm: trial.config.training.learning_rate for trial in trials}
    assert rates == {"grpo-0-001": 1e-3, "grpo-0-002": 2e-3, "gspo-0-001": 1e-3, "gspo-0-002": 2e-3}
    only = Comparison(**started[1]).trials()
    assert [(trial.arm, trial.seed, trial.config.mode) for trial in only] == [
        ("run", seed, "sync") for seed in (1, 2, 3)
    ]


FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]


def test_every_experiment_for_gpus_is_planned_and_fits_an_h800() -> None:
    assert set(plan.PLANNED) == {name for name in experiments() if name.startswith(("gpu-", "paper-"))}
    for experiment, model in plan.PLANNED.items():
        found = check_footprint(compose(experiment, FILES), plan.SPECS[model], 80e9)
        assert found.completions >= 16, experiment  # a group of full length


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["experiment=paper-7b-math"],
            0,
            "24 machines: 144 x 1 GPUs generate, and 48 train; the KV cache of a server holds ",
        ),
        (["experiment=paper-7b-math-sync"], 0, "24 machines: 192 x 1 GPUs generate, then 192 train; "),
        (["--model", "7b"], 2, "training.engine: a rank beside a sleeping server needs "),
        (["--model", "/nowhere"], 2, "/nowhere: is not a model folder"),
        (["launch.accelerator=cpu"], 2, "launch.accelerator: must be cuda"),
    ],
)
def test_command_prints_a_plan_or_refuses(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments, "launch.device_memory_gib=80"]) == status
    told = capsys.readouterr()
    assert said in (told.err if status else told.out)


def test_splits_are_shown_the_best_first_and_a_run_starts_with_it_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After what else is set, so that it holds."""
    recorded_run(tmp_path / ".areal", 2, 6)
    monkeypatch.setattr(advise, "WORK", tmp_path)
    advise.main(["first"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "generation.servers=" in line]
    assert len(rows) == 7
    assert [cell for cell in rows[0] if cell != "│"] == ["4", "4", "1.60", "generation.servers=4", "training.ranks=4"]
    started: list[dict[str, Any]] = []

    def run_command(_name: str, _deployment: str, parameters: Any) -> int:
        started.append(parameters())
        return 0

    monkeypatch.setattr(watch, "run_command", run_command)
    command = ["experiment=emulated-1.5b", "launch.devices=8", "training.ranks=6"]
    for arguments in (command, [*command, "--split", "first"]):
        assert train.main(arguments) == 0
    assert started[0]["overrides"] == ["launch.devices=8", "training.ranks=6"]
    assert started[1]["overrides"] == [*started[0]["overrides"], "generation.servers=4", "training.ranks=4"]
    assert started[0].keys() == started[1].keys()
    assert capsys.readouterr().out == "Split of devices from run first: 4 servers, 4 ranks.\n"


_TABLE = """\
run last change state on this machine in the store leftovers
old DATE finished 999 bytes 1.2 MB -
.pruned-x-2 DATE half deleted 999 bytes 1.2 MB -
left DATE stopped 999 bytes 1.2 MB 2.0 kB
new DATE running 999 bytes 1.2 MB -

To delete: leftovers of 2 runs (1.2 MB). No resume needs them.
To delete whole runs, give --run NAME or --older DAYS."""


def held(run_id: str, days: float, state: State = "finished", leftovers: int = 0) -> StoredRun:
    changed = time.time() - days * 86400.0 - 60
    sizes = {"local_bytes": 999, "stored_bytes": 1_234_567, "leftover_bytes": leftovers}
    return StoredRun(run_id=run_id, folder=Path(run_id), storage=None, state=state, changed=changed, **sizes)


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    done: list[tuple[str, str]] = []
    left, half = held("left", 31, "stopped", 2_000), held(".pruned-x-2", 35, "half deleted")
    runs = [held("old", 40), half, left, held("new", 0, "running")]

    def act(what: str) -> Any:
        def action(run: StoredRun, *_: object) -> None:
            if run.run_id == "left" and what == "delete":
                raise StorageError("storage.url: can't delete it: no rights")
            done.append((what, run.run_id))

        return action

    monkeypatch.setattr(prune, "stored_runs", lambda config, log: runs)
    monkeypatch.setattr(prune, "delete", act("delete"))
    monkeypatch.setattr(prune, "free_leftovers", act("free"))
    return done


def test_what_runs_hold_is_shown(did: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prune"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", "\n".join(lines)) == _TABLE
    assert did == []


@pytest.mark.parametrize(
    ("chosen", "status", "deleted", "line"),
    [
        ([], 0, [("delete", ".pruned-x-2"), ("free", "left")], ""),  # leftovers alone
        (["--run", "old", "--run", "left", "--older", "35"], 0, [("delete", "old")], ""),  # both choices must hold
        (["--older", "30"], 1, [("delete", "old"), ("delete", ".pruned-x-2")], "1 of 3 runs could not be deleted"),
        (["--run", "new"], 2, [], "--run: new is running; stop it first"),
        (["--run", "none"], 2, [], "--run: unknown run none; `areal prune` lists all runs"),
        (["--older", "30d"], 2, [], "argument --older: invalid float value: '30d'; see areal prune --help"),
    ],
)
def test_what_was_chosen_is_deleted(
    did: list[tuple[str, str]],
    chosen: list[str],
    status: int,
    deleted: list[tuple[str, str]],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["prune", *chosen, "--yes"]) == status
    assert did == deleted
    told = capsys.readouterr()
    assert told.err == (f"areal: error: {line}\n" if line else "")
    assert ("left: could not be deleted, repeat the command: storage.url: can't delete it: no rights" in told.out) == (
        status == 1
    )


def test_nothing_is_deleted_without_a_yes(did: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, status, deleted in (("y", 1, []), ("yes", 0, [("delete", "old")])):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert cli.main(["prune", "--run", "old"]) == status
        assert did == deleted


def test_seeds_are_numbers_and_arms_are_names_with_their_overrides() -> None:
    assert parameters(["seed=1,2,7"])["seeds"] == [1, 2, 7]
    given = ["sync: mode=sync", "async-2:mode=async rollout.max_staleness=2 name='two words'", "as-it-is:"]
    assert parameters([], given)["arms"] == {
        "sync": ["mode=sync"],
        "async-2": ["mode=async", "rollout.max_staleness=2", "name=two words"],
        "as-it-is": [],
    }


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"arm": ["sync mode=sync"]}, r"--arm: must be of the form 'NAME: field=value \.\.\.', got 'sync mode=sync'"),
        ({"arm": ["a: mode=sync", "a : mode=async"]}, "--arm: names must be distinct, got a twice"),
        ({"arm": ["a: mode='sync", "b:"]}, "--arm: can't parse \"a: mode='sync\": No closing quotation"),
        ({"arm": ["a: mode=sync", "b: rollout.max_stalenes=1"]}, r"arms\.b: rollout\.max_stalenes: no such field"),
        ({"settings": ["seed=1,x"]}, "seed: must be whole numbers, as in seed=1,2,3, got 'x'"),
        (
            {"settings": ["training.ranks=1,2"]},
            "training.ranks: must be one value; to compare values, define arms with --arm",
        ),
    ],
)
def test_what_is_wrong_is_one_line(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        parameters(**{"settings": [], **asked})
    assert "\n" not in str(caught.value)


@pytest.fixture
def known(tmp_path: Path) -> Comparison:
    arms = {"sync": ["mode=sync"], "standard": ["algorithm=standard"]}
    comparison = Comparison(
        name="first", experiment="cpu-sync", arms=arms, seeds=[5], overrides=[f"state_dir={tmp_path}"]
    )
    comparison.write()
    return comparison


def test_known_comparison_is_continued_with_what_is_said(known: Comparison) -> None:
    assert Comparison(**parameters(known.overrides, name="first")) == known
    again = parameters([*known.overrides, "seed=6"], ["stale: mode=async"], "first")
    assert (again["seeds"], again["arms"], again["experiment"]) == ([6], {"stale": ["mode=async"]}, "cpu-sync")
    with pytest.raises(ConfigError, match=r"^experiment: must be 'cpu-sync' as in the existing comparison first"):
        parameters([*known.overrides, "experiment=cpu-async"], name="first")
