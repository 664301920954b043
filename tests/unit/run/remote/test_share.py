"""Which processes and files belong to a share of a run."""

from __future__ import annotations

from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.run.remote.share import Share, owned


def config(**generation: Any) -> RunConfig:
    launch = {"remote_roles": "both", "devices": 8}
    return load(
        {
            "launch": launch,
            "generation": {"servers": 3, **generation},
            "training": {"ranks": 4, "hosts": 2, "minibatches": 1},
        }
    )


@pytest.mark.parametrize(
    ("settings", "share", "processes", "files"),
    [
        pytest.param(
            config(),
            Share(role="generation", first=1, count=2),
            {"generation-1", "generation-2"},
            {"logs/generation-1", "logs/generation-2", "logs/host-generation-1", "timeline/generation-1",
             "timeline/generation-2"},
            id="servers",
        ),
        pytest.param(  # whose timelines the controller writes
            config(engine="vllm", slots=64),
            Share(role="generation", first=2, count=1),
            {"generation-2"},
            {"logs/generation-2", "logs/vllm-2", "logs/host-generation-2"},
            id="servers of vLLM",
        ),
        pytest.param(
            config(),
            Share(role="trainer", first=1),
            {"trainer-2", "trainer-3"},
            {"logs/node-1", "logs/host-trainer-1", "timeline/trainer-2", "timeline/trainer-3"},
            id="ranks",
        ),
        pytest.param(
            load({"launch": {"remote_roles": "trainer", "head_trains": False}, "training": {"ranks": 1}}),
            Share(role="trainer", first=0),
            {"trainer-0"},
            {"logs/node-0", "logs/host-trainer-0", "timeline/trainer-0", "timeline/publisher-0"},
            id="rank 0 on another machine",
        ),
        pytest.param(  # their places come after those of the controller's machine, and one process has all of them
            load({"rollout": {"reward_workers": 3}}),
            Share(role="rewards", first=2, count=2),
            {"rewards-5"},
            {"logs/rewards-5", "logs/host-rewards-2", "timeline/rewards-5", "timeline/rewards-6"},
            id="reward workers",
        ),
    ],
)  # fmt: skip
def test_processes_and_files_of_a_share(
    settings: RunConfig, share: Share, processes: set[str], files: set[str]
) -> None:
    its = owned(settings, share.settled(settings))
    assert its.processes == processes
    assert {f"{folder}/{name.rpartition('.')[0]}" for folder, name in its.files} == files


def test_shares_overlap_in_one_role() -> None:
    first, other = (Share(role="generation", first=index, count=2) for index in (0, 1))
    assert first.overlaps(other)
    assert not first.overlaps(Share(role="generation", first=2, count=1))
    assert not first.overlaps(Share(role="trainer", first=1, count=1))


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (Share(role="evaluator"), r"launch\.remote_roles: must be evaluator or both"),
        (
            Share(role="trainer"),
            r"--node: must be from 1 to 1, as training\.hosts counts the head node, which is 0, got 0",
        ),
        (Share(role="generation", first=2, count=2), "--first: servers 2 to 3 are more than the run has, 3 "),
        (Share(role="rewards", first=4000, count=97), "--workers: all machines may have 4096, got 4097"),
        (Share(role="generation", first=3), "--first: servers 3 to 5 are more than the run has, 3 "),
    ],
)
def test_what_is_no_share_of_the_run(share: Share, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        share.settled(config())
