"""Experiments for GPUs: each fits where it is meant to, and nowhere smaller; what the page says is what comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from areal_core.models.spec import ModelSpec
from areal_core.planning.footprint import GIB, check_footprint
from flows import plan
from flows.compose import compose, experiments

FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "hardware.md"


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
    found = check_footprint(compose(experiment, FILES), plan.SPECS[model], plan.H800)
    assert found.answers >= 16  # a group of full length


@pytest.mark.parametrize(
    ("experiment", "gib", "said"),
    [
        ("gpu-shared", 40, "training.engine: rank beside a sleeping server needs 44.9 GiB of 40.0 GiB, 4.9 too many"),
        ("paper-small", 24, "training.ranks: rank needs 29.0 GiB of 24.0 GiB, 5.0 too many"),
        ("paper-1.5b-math", 12, "training.microbatch_tokens: rank needs"),
        ("paper-7b-math", 24, "training.microbatch_tokens: rank needs 27.0 GiB of 24.0 GiB, 3.0 too many"),
        ("paper-14b-code", 32, "training.microbatch_tokens: rank needs"),
        ("paper-32b-code", 48, "training.microbatch_tokens: rank needs"),
    ],
)
def test_a_device_that_is_too_small_is_refused(experiment: str, gib: float, said: str) -> None:
    config, spec = compose(experiment, FILES), plan.SPECS[plan.PLANNED[experiment]]
    with pytest.raises(ConfigError) as caught:
        check_footprint(config, spec, gib * GIB)
    message = str(caught.value)
    assert message.startswith(said)
    needed, there, excess = map(float, re.findall(r"([\d.]+) GiB of ([\d.]+) GiB, ([\d.]+) too many", message)[0])
    assert excess == pytest.approx(needed - there, abs=0.11)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["generation.vllm.tensor_parallel=3"], "generation.vllm.tensor_parallel: must divide launch.devices_per_host"),
        (
            ["training.ranks=90", "training.hosts=18"],
            "training.ranks: must be a multiple of launch.devices_per_host (8)",
        ),
        (
            ["training.ranks=97", "training.hosts=97"],
            "launch.devices: must be at least 385 (288 GPUs generate and 97 train), got 384",
        ),
        (["launch.devices=380"], "launch.devices: must be a multiple of launch.devices_per_host (8)"),
    ],
)
def test_what_can_not_be_placed_is_refused(overrides: list[str], said: str) -> None:
    fixed = ["generation.servers=72"] if "training.ranks=97" in overrides else []
    with pytest.raises(ConfigError) as caught:
        plan.plan("paper-32b-code", overrides + fixed)
    assert str(caught.value).startswith(said)


def test_the_page_has_the_table_that_comes_out() -> None:
    assert plan.table() in PAGE.read_text()


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["paper-7b-math", "launch.device_memory_gib=80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("24 machines: 144 x 1 GPUs generate, and 48 train; the cache of a server holds ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["rank", "server"]


def test_the_command_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["gpu-shared", "--model", "7b", "launch.device_memory_gib=80"]) == 2
    shown = capsys.readouterr()
    assert "too many" in shown.out
    assert shown.err.startswith("areal: error: training.engine: rank beside a sleeping server needs ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu-shared", "--model", "/nowhere", "launch.device_memory_gib=80"], "/nowhere: no model folder"),
        (["gpu-shared", "launch.accelerator=cpu", "generation.transfer=files"], "launch.accelerator: must be cuda"),
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
