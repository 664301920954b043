"""Where servers and ranks go, and what can't be placed, in one line that names the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.planning.footprint import check_placement
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
    ("launch", "mode", "ranks", "vllm"),
    [
        ({"devices": 16, "devices_per_host": 8}, "async", 8, {"tensor_parallel": 4}),
        ({"devices": 7}, "async", 1, {"tensor_parallel": 2}),  # of one machine groups may have any size
        ({"devices": 8, "devices_per_host": 8}, "sync", None, {"tensor_parallel": 2}),  # servers and ranks share
    ],
)
def test_what_can_be_placed(launch: dict[str, Any], mode: str, ranks: int | None, vllm: dict[str, int]) -> None:
    check_placement(config(launch, mode=mode, ranks=ranks, **vllm), FORTY)


@pytest.mark.parametrize(
    ("launch", "ranks", "vllm", "said"),
    [
        ((12, 8), 4, {}, "launch.devices: must be a multiple of launch.devices_per_host (8), got 12"),
        (
            (16, 8),
            8,
            {"tensor_parallel": 5},
            "generation.vllm.tensor_parallel: must divide launch.devices_per_host (8), so that no group straddles two "
            "machines, got 5",
        ),
        (
            (24, 8),
            8,
            {"tensor_parallel": 4, "data_parallel": 3},
            "generation.vllm.data_parallel: with tensor_parallel=4 a server takes 12 GPUs, which must divide "
            "launch.devices_per_host (8); got 3",
        ),
        (
            (16, 8),
            4,
            {},
            "training.ranks: must be a multiple of launch.devices_per_host (8), so that ranks fill whole machines, "
            "got 4",
        ),
        (
            (8, None),
            1,
            {"tensor_parallel": 3},
            "generation.vllm.tensor_parallel: must divide the model's 40 heads, and divide its 8 key-value heads or be "
            "a multiple of them, got 3",
        ),
        (
            (8, None),
            1,
            {"tensor_parallel": 5},
            "generation.vllm.tensor_parallel: must divide the model's 40 heads, and divide its 8 key-value heads or be "
            "a multiple of them, got 5",
        ),
        # Refused as the configuration is loaded:
        ((8, 8), 7, {"tensor_parallel": 2}, "launch.devices: must be at least 9 (2 GPUs generate and 7 train), got 8"),
        ((4, 8), 1, {"tensor_parallel": 8}, "launch.devices: must be at least 9 (8 GPUs generate and 1 train), got 4"),
    ],
)
def test_what_can_not_be_placed(launch: tuple[int, int | None], ranks: int, vllm: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_placement(config({"devices": launch[0], "devices_per_host": launch[1]}, ranks=ranks, **vllm), FORTY)
    assert str(caught.value) == said
