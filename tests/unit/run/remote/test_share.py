"""Which processes and files belong to a share of a run."""

from __future__ import annotations

from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.run.remote.share import Share, owned, places


def config(**generation: Any) -> RunConfig:
    launch = {"remote_roles": "both", "devices": 8}
    return load(
        {
            "launch": launch,
            "generation": {"servers": 3, **generation},
            "training": {"ranks": 4, "hosts": 2, "minibatches": 1},
        }
    )


def test_servers() -> None:
    share = Share(role="generation", first=1, count=2).settled(config())
    assert list(share.indices) == [1, 2]
    its = owned(config(), share)
    assert its.processes == {"generation-1", "generation-2"}
    assert its.files == {
        ("logs", "generation-1.log"),
        ("logs", "generation-2.log"),
        ("logs", "host-generation-1.log"),
        ("timeline", "generation-1.jsonl"),
        ("timeline", "generation-2.jsonl"),
    }


def test_servers_of_vllm_whose_timelines_the_controller_writes() -> None:
    settings = config(engine="vllm", slots=64)
    its = owned(settings, Share(role="generation", first=2, count=1).settled(settings))
    assert its.files == {("logs", f"{name}.log") for name in ("generation-2", "vllm-2", "host-generation-2")}


def test_ranks() -> None:
    share = Share(role="trainer", first=1).settled(config())
    its = owned(config(), share)
    assert its.processes == {"trainer-2", "trainer-3"}
    assert its.files == {
        ("logs", "node-1.log"),
        ("logs", "host-trainer-1.log"),
        ("timeline", "trainer-2.jsonl"),
        ("timeline", "trainer-3.jsonl"),
    }


def test_rank_0_on_another_machine() -> None:
    launch = {"remote_roles": "trainer", "head_trains": False, "devices": 8}
    settings = load({"launch": launch, "training": {"ranks": 1}})
    its = owned(settings, Share(role="trainer", first=0).settled(settings))
    assert its.processes == {"trainer-0"}
    assert {("timeline", "trainer-0.jsonl"), ("timeline", "publisher-0.jsonl")} < its.files
    with pytest.raises(ConfigError, match=r"^--node: must be from 0 to 0, got 1"):
        Share(role="trainer", first=1).settled(settings)


def test_reward_workers() -> None:
    """Their places come after those of the controller's machine, and one process has all of them."""
    settings = load({"rollout": {"reward_workers": 3}})
    share = Share(role="rewards", first=2, count=2).settled(settings)
    assert list(places(settings, share)) == [5, 6]
    its = owned(settings, share)
    assert its.processes == {"rewards-5"}
    assert its.files == {
        ("logs", "rewards-5.log"),
        ("logs", "host-rewards-2.log"),
        ("timeline", "rewards-5.jsonl"),
        ("timeline", "rewards-6.jsonl"),
    }


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
