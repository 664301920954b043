"""What fits and what does not, where servers and ranks go, and the one line that says by how much."""

import dataclasses
import re
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.models.spec import ModelSpec
from areal_core.planning.footprint import (
    GIB,
    MARGIN,
    SLEEPING,
    check_footprint,
    check_placement,
    training_pass,
    training_state,
)
from areal_core.planning.time_model import SPECS

SPEC = SPECS["7b"]  # of 7,615,616,512 parameters
EIGHTY = 80 * GIB


def config(mode: str = "async", **groups: dict[str, Any]) -> RunConfig:
    """Eight GPUs, six of which generate, completions of 7168 tokens for prompts of 1024; DeepSpeed at stage 3."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "m", "context": 8192},
        "task": {"max_prompt_tokens": 1024, "max_new_tokens": 7168},
        "generation": {"engine": "vllm", "slots": 128},
        "training": {
            "engine": "deepspeed", "zero_stage": 3, "dtype": "bfloat16", "checkpoint_activations": True,
            "microbatch_tokens": 8192, "ranks": 2,
        },
        "launch": {"accelerator": "cuda", "devices": 8},
    }  # fmt: skip
    return load({"mode": mode} | {name: values.get(name, {}) | groups.get(name, {}) for name in values | groups})


def refusal(chosen: RunConfig, memory: float = EIGHTY, spec: ModelSpec = SPEC) -> str:
    with pytest.raises(ConfigError) as caught:
        check_footprint(chosen, spec, memory)
    return str(caught.value)


def test_a_server_caches_what_is_left_of_its_share() -> None:
    chosen = config(training={"ranks": 4})
    found = check_footprint(chosen, SPEC, EIGHTY)
    rank, server = found.needs
    assert (rank.who, server.who) == ("rank", "server")
    assert rank.limit == EIGHTY
    assert server.limit == 0.85 * EIGHTY  # generation.vllm.memory_share
    # 68 GiB, less weights, a step (8192 tokens x (3 x 18944 + 4 x 3584) x 2 bytes, 128 slots x 152064 x 12) and the
    # margin, in completions of 8192 tokens x 57344 bytes.
    left = 68 * GIB - 2 * 7_615_616_512 - 8192 * 71168 * 2 - 128 * 152064 * 12 - 6.4 * GIB
    assert found.completions == int(left // (8192 * 57344)) == 105


@pytest.mark.parametrize(
    ("training", "memory", "field", "advice"),
    [
        ({"ranks": 1}, 80, "zero_stage", "raise zero_stage (to 3) or ranks, or lower microbatch_tokens"),
        (
            {"engine": "torch", "zero_stage": 2},
            80,
            "engine",
            "set it to deepspeed, which shards training state across ranks",
        ),
        ({"ranks": 4, "microbatch_tokens": 131072}, 80, "microbatch_tokens", "if trajectories are that long"),
    ],
)
def test_the_field_to_change_is_that_of_the_largest_part(
    training: dict[str, Any], memory: float, field: str, advice: str
) -> None:
    said = refusal(config(training=training), memory * GIB)
    assert said.startswith(f"training.{field}: a rank needs ")
    assert said.endswith(advice)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"training": {"zero_stage": 2}},  # 14.19 + 14.19 + 42.56 + 28.37 + 3.73 + 6.4 = 109.43
            "training.zero_stage: a rank needs 109.4 GiB of GPU memory, 29.4 GiB more than its 80.0 GiB: weights 14.2, "
            "gradients 14.2, optimiser 42.6, update 28.4, collectives 3.7, margin 6.4; raise zero_stage (to 3) "
            "or ranks, or lower microbatch_tokens",
        ),
        (
            {"training": {"ranks": 4}, "generation": {"vllm": {"memory_share": 0.2}}},
            "generation.vllm.tensor_parallel: a server needs 22.3 GiB of GPU memory, 6.3 GiB more than its 16.0 GiB: "
            "weights 14.2, step 1.3, cache 0.4, margin 6.4; raise it, or generation.vllm.memory_share",
        ),
    ],
)
def test_refusal_names_the_field_and_every_part(groups: dict[str, dict[str, Any]], said: str) -> None:
    assert refusal(config(**groups)) == said


# -- both on one GPU ---------------------------------------------------------------------------------------------------

SMALL = dataclasses.replace(SPEC, layers=4)


def shared(**generation: Any) -> RunConfig:
    return config(
        "sync", launch={"devices": 1}, training={"engine": "torch", "zero_stage": 2, "ranks": 1}, generation=generation
    )


def test_a_server_that_sleeps_gives_its_memory_to_the_rank() -> None:
    chosen = shared(sleep=True, vllm={"memory_share": 0.25})
    training, generating, server = check_footprint(chosen, SMALL, EIGHTY).needs
    state, run = training_state(chosen, SMALL), training_pass(chosen, SMALL)
    assert training.parts == state | run | {"sleeping server": SLEEPING, "margin": MARGIN * EIGHTY}
    assert generating.parts == state | {"server": 20 * GIB, "margin": MARGIN * EIGHTY}
    assert server.limit == 20 * GIB
    assert refusal(shared(sleep=True), spec=SMALL) == (  # 0.85 of 80 GiB
        "generation.vllm.memory_share: a server beside a rank needs 112.1 GiB of GPU memory, 32.1 GiB more than "
        "its 80.0 GiB: weights 3.8, gradients 11.3, optimiser 22.6, server 68.0, margin 6.4; lower it"
    )


@pytest.mark.parametrize("generation", [{"vllm": {"memory_share": 0.25}}, {"engine": "embedded", "slots": 16}])
def test_awake_both_have_all_of_theirs_at_once(generation: dict[str, Any]) -> None:
    said = refusal(shared(**generation), 60 * GIB, SMALL)
    assert re.match(
        r"generation\.sleep: a rank beside a server needs .*; set generation\.sleep=true and generation", said
    )
    check_footprint(shared(**generation), SMALL, 160 * GIB)


FORTY = dataclasses.replace(SPEC, heads=40, kv_heads=8)


def placed(devices: int, per_host: int | None, ranks: int | None, tensor: int, data: int = 1, **top: str) -> RunConfig:
    return load(
        {
            "generation": {"engine": "vllm", "vllm": {"tensor_parallel": tensor, "data_parallel": data}},
            "training": {"ranks": ranks},
            "launch": {"accelerator": "cuda", "devices": devices, "devices_per_host": per_host},
        }
        | top
    )


def test_what_can_be_placed() -> None:
    check_placement(placed(16, 8, 8, 4), FORTY)
    check_placement(placed(7, None, 1, 2), FORTY)  # of one machine groups may have any size
    check_placement(placed(8, 8, None, 2, mode="sync"), FORTY)  # servers and ranks share


HOST = "launch.devices_per_host (8)"
HEADS = "must be a divisor of the model's 40 heads, and a divisor or multiple of 8 key-value heads, got"
STRADDLES = f"tensor_parallel * data_parallel: must be a divisor of {HOST}, so that no server spans two machines, got"


@pytest.mark.parametrize(
    ("devices", "ranks", "tensor", "data", "said"),
    [
        (12, 4, 1, 1, f"launch.devices: must be a multiple of {HOST}, got 12"),
        (16, 8, 5, 1, f"generation.vllm.{STRADDLES} 5"),
        (24, 8, 4, 3, f"generation.vllm.{STRADDLES} 12"),
        (16, 4, 1, 1, f"training.ranks: must be a multiple of {HOST}, so that ranks fill whole machines, got 4"),
        (8, 1, 3, 1, f"generation.vllm.tensor_parallel: {HEADS} 3"),
        (8, 1, 5, 1, f"generation.vllm.tensor_parallel: {HEADS} 5"),
    ],
)
def test_what_can_not_be_placed(devices: int, ranks: int, tensor: int, data: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        check_placement(placed(devices, 8, ranks, tensor, data), FORTY)
