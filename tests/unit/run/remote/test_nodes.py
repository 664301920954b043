"""Remote workers as the head node has heard of them: a share has one, and what it says stands in the run's folder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from areal_core.errors import ConfigError
from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import Heartbeat
from areal_core.run.remote.share import GONE_S, Nodes, Said, TakenError
from tests.support.remote import HeadNode


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nodes(head_node: HeadNode, clock: Clock) -> Nodes:
    return Nodes(head_node.run, head_node.config, clock)


def said(first: int = 0, count: int = 1, role: str = "generation", **fields: Any) -> Said:
    values = {"role": role, "first": first, "count": count, "address": "10.0.0.2"} | fields
    return msgspec.convert(values, Said)


BEAT: dict[str, Any] = {"pid": 7, "beats": 3, "turns": 2, "progress": 9, "doing": "generating", "waits_for": None}
LATER: dict[str, Any] = {**BEAT, "beats": 4}


def test_a_share_is_one_workers_until_it_is_silent_for_too_long(nodes: Nodes, clock: Clock) -> None:
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


def test_workers_that_have_said_their_last_words_or_are_gone_are_not_awaited(nodes: Nodes, clock: Clock) -> None:
    nodes.hear("a", said())
    nodes.hear("a", said(over=True))
    assert not nodes.awaited
    nodes.hear("b", said())  # there is room at once
    assert nodes.awaited
    clock.now += GONE_S
    assert not nodes.awaited


def test_what_its_processes_say_is_in_the_runs_folder_as_long_as_they_say_it(nodes: Nodes, head_node: HeadNode) -> None:
    run = head_node.run
    nodes.hear(
        "a", said(ready={"generation-0": {"pid": 7, "url": "http://10.0.0.2:1"}}, heartbeats={"generation-0": BEAT})
    )
    assert run.ready_info("generation") == {"pid": 7, "url": "http://10.0.0.2:1"}
    assert heartbeat.read(run.heartbeat_file("generation")) == Heartbeat(**BEAT)
    nodes.hear("a", said(heartbeats={"generation-0": LATER}))
    assert run.ready_info("generation") is None
    assert heartbeat.read(run.heartbeat_file("generation")) == Heartbeat(**LATER)
    nodes.hear("a", said(heartbeats={"generation-0": BEAT}, over=True))
    assert heartbeat.read(run.heartbeat_file("generation")) is None


@pytest.mark.parametrize(
    ("name", "what", "line"),
    [
        ("../a", said(), "node: must be letters, digits"),
        ("a", said(2), r"--first: servers 2 to 2 are more than the run has"),
        ("a", said(0, role="trainer"), "--node: must be from 1 to 1"),
        ("a", said(ready={"generation-1": {"pid": 1}}), "ready, heartbeats: 'generation-1' is none of generation-0$"),
        ("a", said(heartbeats={"controller-0": BEAT}), "ready, heartbeats: 'controller-0' is none of generation-0$"),
    ],
)
def test_what_no_worker_says_changes_nothing(
    nodes: Nodes, head_node: HeadNode, name: str, what: Said, line: str
) -> None:
    with pytest.raises((ValueError, ConfigError), match=f"^{line}"):
        nodes.hear(name, what)
    assert not nodes.awaited
    assert not list(head_node.run.ready.iterdir())
