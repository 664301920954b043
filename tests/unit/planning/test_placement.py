"""Where servers and ranks go, and what can't be placed, in one line that names the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.planning.placement import check_placement
from tests.support.models import SPEC

FORTY = dataclasses.replace(SPEC, heads=40, kv_heads=8)


def config(launch: dict[str, Any], *, mode: str = "async", ranks: int | None = None, **vllm: int) -> RunConfig:
    return load(
        {
            "mode": mode,
            "generation": {"engine": "vllm", "vllm": vllm},
            "training": {"ranks": ranks},
            "launch": {"accelerator": "cuda"} | launch,
        }
    )


@pytest.mark.parametrize(
    "chosen",
    [
        config({"devices": 16, "devices_per_host": 8}, ranks=8, tensor_parallel=4),
        config({"devices": 7}, ranks=1, tensor_parallel=2),  # of one machine groups may have any size
        config({"devices": 8, "devices_per_host": 8}, mode="sync", tensor_parallel=2),  # servers and ranks share
    ],
)
def test_what_can_be_placed(chosen: RunConfig) -> None:
    check_placement(chosen, FORTY)


TWO = {"devices": 16, "devices_per_host": 8}


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            config({"devices": 12, "devices_per_host": 8}, ranks=4),
            "launch.devices: must be a multiple of launch.devices_per_host (8), got 12",
        ),
        (
            config(TWO, ranks=8, tensor_parallel=5),
            "generation.vllm.tensor_parallel: must divide launch.devices_per_host (8), so that no group straddles two "
            "machines, got 5",
        ),
        (
            config({"devices": 24, "devices_per_host": 8}, ranks=8, tensor_parallel=4, data_parallel=3),
            "generation.vllm.data_parallel: with tensor_parallel=4 a server takes 12 GPUs, which must divide "
            "launch.devices_per_host (8); got 3",
        ),
        (
            config(TWO, ranks=4),
            "training.ranks: must be a multiple of launch.devices_per_host (8), so that ranks fill whole machines, "
            "got 4",
        ),
        (
            config({"devices": 8}, ranks=1, tensor_parallel=3),
            "generation.vllm.tensor_parallel: must divide the model's 40 heads, and divide its 8 key-value heads or be "
            "a multiple of them, got 3",
        ),
        (
            config({"devices": 8}, ranks=1, tensor_parallel=5),
            "generation.vllm.tensor_parallel: must divide the model's 40 heads, and divide its 8 key-value heads or be "
            "a multiple of them, got 5",
        ),
    ],
)
def test_what_can_not_be_placed(chosen: RunConfig, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_placement(chosen, FORTY)
    assert str(caught.value) == said


def test_ranks_that_find_no_gpus_are_refused_as_the_configuration_is_loaded() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"devices": 8, "devices_per_host": 8}, ranks=7, tensor_parallel=2)
    assert str(caught.value) == "launch.devices: must be at least 9 (2 GPUs generate and 7 train), got 8"


def test_a_server_larger_than_a_machine_is_refused_as_the_configuration_is_loaded() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"devices": 4, "devices_per_host": 8}, ranks=1, tensor_parallel=8)
    assert str(caught.value) == "launch.devices: must be at least 9 (8 GPUs generate and 1 train), got 4"
