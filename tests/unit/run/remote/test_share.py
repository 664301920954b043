"""Shares of a run, their processes and files, and the workers that have them as the head node has heard of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.run.remote.share import GONE_S, Nodes, Said, Share, TakenError, owned
from tests.support.remote import HeadNode


def config(**generation: Any) -> RunConfig:
    launch, training = {"remote_roles": "both", "devices": 8}, {"ranks": 4, "hosts": 2, "minibatches": 1}
    return load({"launch": launch, "generation": {"servers": 3, **generation}, "training": training})


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


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (Share(role="evaluator"), r"launch\.remote_roles: must be evaluator or both"),
        (Share(role="trainer"), r"--node: must be from 1 to 1, as training\.hosts counts the head node, which is 0, g"),
        (Share(role="rewards", first=4000, count=97), "--workers: all machines may have 4096, got 4097"),
        (Share(role="generation", first=3), "--first: servers 3 to 5 are more than the run has, 3 "),
    ],
)
def test_what_is_no_share_of_the_run(share: Share, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        share.settled(config())


# -- the workers that have them ----------------------------------------------------------------------------------------


def said(first: int = 0, count: int = 1, role: str = "generation", **fields: Any) -> Said:
    values = {"role": role, "first": first, "count": count, "address": "10.0.0.2"} | fields
    return msgspec.convert(values, Said)


def test_a_share_is_one_workers_until_it_is_silent_for_too_long(head_node: HeadNode) -> None:
    clock = SimpleNamespace(now=1000.0)
    nodes = Nodes(head_node.run, head_node.config, lambda: clock.now)
    nodes.hear("a", said(0, 2))
    with pytest.raises(TakenError, match=r"^--head: generation 1 of run r is run by another .* at 10\.0\.0\.2$"):
        nodes.hear("b", said(1))
    nodes.hear("t", said(1, role="trainer"))  # another role
    clock.now += GONE_S - 1
    nodes.hear("a", said(0, 2))
    clock.now += GONE_S - 1
    with pytest.raises(TakenError):
        nodes.hear("b", said(1))
    clock.now += 1
    nodes.hear("b", said(1))
    assert nodes.owned("a") is None
    with pytest.raises(TakenError):  # it comes back
        nodes.hear("a", said(0, 2))
