"""Experiments for GPUs: each fits where it is meant to; the command prints it, or refuses in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from areal_core.models.spec import ModelSpec
from areal_core.planning.footprint import check_footprint
from flows import plan
from flows.compose import compose, experiments

FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("0.5b", 494_032_768),
        ("1.5b", 1_777_088_000),
        ("1.5b-tied", 1_543_714_304),
        ("7b", 7_615_616_512),
        ("14b", 14_770_033_664),
        ("32b", 32_763_876_352),
    ],
)
def test_sizes_are_the_published_ones(name: str, parameters: int) -> None:
    assert plan.SPECS[name].parameters == parameters


def test_every_experiment_for_gpus_is_planned() -> None:
    assert set(plan.PLANNED) == {name for name in experiments() if name.startswith(("gpu-", "paper-"))}


@pytest.mark.parametrize(("experiment", "model"), plan.PLANNED.items())
def test_every_planned_experiment_fits_an_h800(experiment: str, model: str) -> None:
    found = check_footprint(compose(experiment, FILES), plan.SPECS[model], 80e9)
    assert found.completions >= 16  # a group of full length


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["paper-7b-math", "launch.device_memory_gib=80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("24 machines: 144 x 1 GPUs generate, and 48 train; the KV cache of a server holds ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["rank", "server"]


@pytest.mark.parametrize(
    ("experiment", "said"),
    [
        ("paper-1.5b-math-sync", "16 machines: 128 x 1 GPUs generate, then 128 train; "),
        ("paper-7b-math-sync", "24 machines: 192 x 1 GPUs generate, then 192 train; "),
        ("paper-14b-code-sync", "32 machines: 128 x 2 GPUs generate, then 256 train; "),
        ("paper-32b-code-sync", "48 machines: 96 x 4 GPUs generate, then 384 train; "),
    ],
)
def test_in_a_synchronous_arm_all_gpus_generate_and_then_all_train(
    experiment: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([experiment, "launch.device_memory_gib=80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(said)
    kinds = ["rank beside a sleeping server", "server beside a rank", "server"]
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


def test_the_command_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["gpu-shared", "--model", "7b", "launch.device_memory_gib=80"]) == 2
    shown = capsys.readouterr()
    assert "too many" in shown.out
    assert shown.err.startswith("areal: error: training.engine: rank beside a sleeping server needs ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu-shared", "--model", "/nowhere", "launch.device_memory_gib=80"], "/nowhere: no model folder"),
        (["gpu-shared", "launch.accelerator=cpu"], "launch.accelerator: must be cuda"),
        (["paper-small", "training.stepz=1"], "training.stepz: no such field"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_folder_says_how_large_its_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_config(tmp_path, plan.SPECS["0.5b"])
    assert plan.main(["gpu-shared", "--model", str(tmp_path), "launch.device_memory_gib=24"]) == 0
    assert "fits" in capsys.readouterr().out


def _write_config(folder: Path, spec: ModelSpec) -> None:
    values = {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.intermediate_size,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.context,
        "eos_token_id": 151643,
    }
    (folder / "config.json").write_text(json.dumps(values))
