"""Experiments for GPUs: each fits where it is meant to; the command prints it, or refuses in one line."""

from __future__ import annotations

import pytest

from areal_core.planning.footprint import check_footprint
from areal_core.run.command import run_command
from flows import plan
from flows.compose import compose, experiments

FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]


def test_every_experiment_for_gpus_is_planned_and_fits_an_h800() -> None:
    assert set(plan.PLANNED) == {name for name in experiments() if name.startswith(("gpu-", "paper-"))}
    for experiment, model in plan.PLANNED.items():
        found = check_footprint(compose(experiment, FILES), plan.SPECS[model], 80e9)
        assert found.completions >= 16, experiment  # a group of full length


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["paper-7b-math"], 0, "24 machines: 144 x 1 GPUs generate, and 48 train; the KV cache of a server holds "),
        (["paper-7b-math-sync"], 0, "24 machines: 192 x 1 GPUs generate, then 192 train; "),
        (["gpu-shared", "--model", "7b"], 2, "training.engine: rank beside a sleeping server needs "),
        (["gpu-shared", "--model", "/nowhere"], 2, "/nowhere: no model folder"),
        (["gpu-shared", "launch.accelerator=cpu"], 2, "launch.accelerator: must be cuda"),
        (["paper-small", "training.stepz=1"], 2, "training.stepz: no such field"),
    ],
)
def test_command_prints_a_plan_or_refuses(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: plan.main([*arguments, "launch.device_memory_gib=80"])) == status
    told = capsys.readouterr()
    assert said in (told.err if status else told.out)
