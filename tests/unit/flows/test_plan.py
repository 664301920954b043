"""Experiments for GPUs: each fits where it is meant to; the command prints it, or refuses in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_core.planning.footprint import check_footprint
from flows import plan
from flows.compose import compose, experiments
from tests.support.models import write_tiny

ASLEEP = ["rank beside a sleeping server", "server beside a rank", "server"]
FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]


def test_every_experiment_for_gpus_is_planned_and_fits_an_h800() -> None:
    assert set(plan.PLANNED) == {name for name in experiments() if name.startswith(("gpu-", "paper-"))}
    for experiment, model in plan.PLANNED.items():
        found = check_footprint(compose(experiment, FILES), plan.SPECS[model], 80e9)
        assert found.completions >= 16, experiment  # a group of full length


@pytest.mark.parametrize(
    ("experiment", "said", "kinds"),
    [
        ("paper-7b-math", "144 x 1 GPUs generate, and 48 train; the KV cache of a server holds ", ["rank", "server"]),
        ("paper-7b-math-sync", "192 x 1 GPUs generate, then 192 train; ", ASLEEP),
    ],
)
def test_command_prints_plan(experiment: str, said: str, kinds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([experiment, "launch.device_memory_gib=80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"24 machines: {said}")
    assert [line.partition(":")[0] for line in lines[1:]] == kinds


def test_a_sequence_that_no_rank_holds_is_refused_with_one_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["paper-32b-code-sync", "launch.device_memory_gib=40", "generation.vllm.memory_share=0.8"]
    assert plan.main(small) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = re.search(r"at most (\d+) fit; lower it to (\d+), and training.microbatch_tokens to \d+$", line)
    assert line.startswith("areal: error: task.max_new_tokens: rank beside a sleeping server needs ")
    assert found is not None
    shorter = [f"task.max_new_tokens={found[2]}", f"training.microbatch_tokens={found[1]}"]
    assert plan.main([*small, *shorter]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu-shared", "--model", "7b"], "training.engine: rank beside a sleeping server needs "),
        (["gpu-shared", "--model", "/nowhere"], "/nowhere: no model folder"),
        (["gpu-shared", "launch.accelerator=cpu"], "launch.accelerator: must be cuda"),
        (["paper-small", "training.stepz=1"], "training.stepz: no such field"),
    ],
)
def test_command_refuses_what_can_not_be_planned(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*arguments, "launch.device_memory_gib=80"]) == 2
    assert said in capsys.readouterr().err


def test_model_folder_gives_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "model")
    assert plan.main(["gpu-shared", "--model", str(folder), "launch.device_memory_gib=24"]) == 0
    assert "fits" in capsys.readouterr().out
