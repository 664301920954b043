"""What becomes of shares and nodes, said by stand-ins for Prefect and Terraform, and of the flow that looks on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest

from areal_core.config.groups import NodesConfig, ProvisionConfig
from areal_core.errors import ConfigError, ProcessError, ProvisionError
from areal_core.storage.lease import LeaseLostError
from flows import on_nodes
from flows.fleet import Fleet, ShareState, Stage
from flows.provision.nodes import Host

CPU = NodesConfig(gpu="none", gpus=0)
CONFIG = ProvisionConfig(
    kind="terraform",
    image="ami-1",
    generation=replace(CPU, count=2, spot=True),
    trainer=CPU,
    boot_s=100.0,
    lost_s=30.0,
    replacements=3,
)
_PATIENCE_S = 20.0


class Cloud:
    """Nodes, shares and time, as a test has them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.numbers: dict[str, int] = dict.fromkeys(("generation-0", "generation-1", "trainer-0"), 0)
        self.silence: dict[str, float] = {}  # by node
        self.shares: dict[str, ShareState] = {}
        self.names: dict[str, str] = {}  # of shares, by id
        self.refuses: list[ProvisionError] = []
        self.replaced: list[list[str]] = []
        self.lost: list[str] = []
        self.said: list[str] = []

    # -- Supply

    def hosts(self) -> list[Host]:
        return [
            Host(name=name, role=name.split("-")[0], address="", id=self.node(name), type="", spot=False)
            for name in self.numbers
        ]

    def replace(self, names: Iterable[str]) -> list[Host]:
        if self.refuses:
            raise self.refuses.pop()
        self.replaced.append([*names])
        for name in self.replaced[-1]:
            self.silence.pop(self.node(name), None)
            self.numbers[name] += 1
            self.silence[self.node(name)] = 0.0
        return self.hosts()

    # -- Work

    def submit(self, role: str, index: int) -> str:
        share = f"{role}-{index}/{sum(name == f'{role}-{index}' for name in self.names.values())}"
        self.names[share] = f"{role}-{index}"
        self.shares[share] = ShareState(Stage.WAITING, None, "")
        return share

    def states(self, ids: Iterable[str]) -> Mapping[str, ShareState]:
        return {each: self.shares[each] for each in ids}

    def mark_lost(self, share: str, reason: str) -> None:
        self.lost.append(share)
        self.shares[share] = replace(self.shares[share], stage=Stage.FAILED, message=reason)

    def heartbeat_age_s(self) -> Mapping[str, float]:
        return dict(self.silence)

    # -- what happens

    def node(self, name: str) -> str:
        return f"i-{name}.{self.numbers[name]}"

    def pass_s(self, fleet: Fleet, seconds: float) -> None:
        """With looks in between."""
        for _ in range(int(seconds)):
            self.now += 1.0
            fleet.reconcile()

    def newest(self, name: str) -> str:
        return [share for share, of in self.names.items() if of == name][-1]

    def up(self) -> None:
        """All nodes are there, and every share that waits is at work."""
        for name in self.numbers:
            self.silence.setdefault(self.node(name), 0.0)
            if self.shares[self.newest(name)].stage is Stage.WAITING:
                self.becomes(name, Stage.RUNNING)

    def becomes(self, name: str, stage: Stage, message: str = "") -> None:
        self.shares[self.newest(name)] = ShareState(stage, self.node(name), message)


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@contextmanager
def fleet_of(
    cloud: Cloud, config: ProvisionConfig = CONFIG, *, given: bool = False, up: bool = True
) -> Iterator[Fleet]:
    shares: Any = cloud
    options: dict[str, Any] = {"log": cloud.said.append, "clock": lambda: cloud.now}
    with Fleet(config, cloud.hosts(), shares, None if given else shares, restarts=2, **options) as fleet:
        if up:
            cloud.up()
        fleet.reconcile()
        yield fleet


def all_run(fleet: Fleet) -> bool:
    return all(share.state.stage is Stage.RUNNING for share in fleet.shares)


def until(fleet: Fleet, condition: Callable[[], bool]) -> None:
    """Nodes are replaced in a thread."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        fleet.reconcile()
        time.sleep(0.001)


@pytest.mark.parametrize("name", ["generation-1", "trainer-0"])
@pytest.mark.parametrize("stage", [Stage.RECLAIMED, Stage.BAD_NODE])
def test_node_that_is_reclaimed_or_bad_is_replaced_and_its_share_given_out_again(
    cloud: Cloud, stage: Stage, name: str
) -> None:
    with fleet_of(cloud) as fleet:
        cloud.becomes(name, stage, "as the cloud says")
        until(fleet, lambda: cloud.newest(name) == f"{name}/1")
        assert cloud.replaced == [[name]]
        assert cloud.newest("generation-0") == "generation-0/0"  # the others stay
        cloud.up()
        fleet.reconcile()
        assert all_run(fleet)
        cloud.becomes("trainer-0", stage_at_end := Stage.DONE if name == "trainer-0" else Stage.CANCELLED)
        fleet.reconcile()
        assert (fleet.over, fleet.cancelled) == (stage_at_end is Stage.DONE, stage_at_end is Stage.CANCELLED)


def test_silent_node_loses_its_share(cloud: Cloud) -> None:
    with fleet_of(cloud) as fleet:
        cloud.pass_s(fleet, 31)
        cloud.silence[cloud.node("generation-0")] = 31.0
        until(fleet, lambda: cloud.newest("generation-0") == "generation-0/1")
    assert (cloud.lost, cloud.replaced) == (["generation-0/0"], [["generation-0"]])
    assert any("sent no heartbeat for more than 30 s" in line for line in cloud.said)


def test_nodes_that_a_server_could_not_hear_are_not_lost(cloud: Cloud) -> None:
    with fleet_of(cloud) as fleet:
        cloud.pass_s(fleet, 60)
        cloud.now += 600.0  # Prefect's server is away
        cloud.silence = dict.fromkeys(cloud.silence, 600.0)
        cloud.pass_s(fleet, 5)
        cloud.silence = dict.fromkeys(cloud.silence, 1.0)
        cloud.pass_s(fleet, 60)
        assert all_run(fleet)
    assert cloud.replaced == cloud.lost == []


@pytest.mark.parametrize("taken", [False, True])
def test_a_node_that_never_comes_up_is_replaced(cloud: Cloud, taken: bool) -> None:
    """Its share goes on waiting, unless the node takes it at the last moment."""
    late = ShareState(Stage.RUNNING, cloud.node("generation-1"), "")

    def replace_late(names: Iterable[str]) -> list[Host]:
        cloud.shares["generation-1/0"] = late
        return Cloud.replace(cloud, names)

    if taken:
        cloud.replace = replace_late  # pyright: ignore[reportAttributeAccessIssue]
    with fleet_of(cloud, up=False) as fleet:
        for name in ("trainer-0", "generation-0"):
            cloud.silence[cloud.node(name)] = 0.0
            cloud.becomes(name, Stage.RUNNING)
        cloud.now = 99.0
        fleet.reconcile()
        assert cloud.replaced == []
        cloud.now = 101.0
        until(fleet, lambda: cloud.replaced == [["generation-1"]])
        until(fleet, lambda: cloud.newest("generation-1") == f"generation-1/{int(taken)}")
        cloud.up()
        until(fleet, lambda: all_run(fleet))
    assert cloud.lost == ["generation-1/0"] * taken


def test_refused_replacement_is_tried_again_and_the_run_goes_on(cloud: Cloud) -> None:
    cloud.refuses = [ProvisionError("terraform apply: InsufficientInstanceCapacity")]
    with fleet_of(cloud) as fleet:
        cloud.becomes("generation-0", Stage.RECLAIMED)
        until(fleet, lambda: not cloud.refuses)
        until(fleet, lambda: any("InsufficientInstanceCapacity" in line for line in cloud.said))
        fleet.reconcile()
        assert cloud.replaced == []  # a minute has not passed
        cloud.now += 61.0
        until(fleet, lambda: cloud.replaced == [["generation-0"]])


def test_run_without_a_trainer_does_not_wait_for_ever(cloud: Cloud) -> None:
    cloud.refuses = [ProvisionError("terraform apply: quota")] * 100
    with fleet_of(cloud) as fleet:
        cloud.becomes("trainer-0", Stage.RECLAIMED)

        def later() -> bool:
            cloud.now += 61.0
            return False

        with pytest.raises(ProvisionError, match="quota"):
            until(fleet, later)


def test_share_that_fails_is_tried_again_and_then_the_run_goes_on_without(cloud: Cloud) -> None:
    with fleet_of(cloud) as fleet:
        for number in (1, 2):
            cloud.becomes("generation-1", Stage.FAILED, "its processes died")
            fleet.reconcile()
            assert cloud.newest("generation-1") == f"generation-1/{number}"
        cloud.becomes("generation-1", Stage.FAILED, "its processes died")
        fleet.reconcile()
        assert any("continues without it: its processes died" in line for line in cloud.said)
        cloud.becomes("generation-0", Stage.CANCELLED)
        with pytest.raises(ProcessError, match="no generation node is left"):
            fleet.reconcile()


@pytest.mark.parametrize(
    ("stage", "times", "message", "error"),
    [
        (Stage.FAILED, 3, "the controller died", ProcessError(r"^trainer-0: the controller died$")),
        (Stage.REFUSED, 1, "task.path: there is no such file", ConfigError(r"^task\.path: there is no such file$")),
    ],
)
def test_head_node_that_fails_again_and_again_or_is_refused_is_the_end(
    cloud: Cloud, stage: Stage, times: int, message: str, error: Exception
) -> None:
    with fleet_of(cloud) as fleet:
        for _ in range(times - 1):
            cloud.becomes("trainer-0", stage, message)
            fleet.reconcile()
        cloud.becomes("trainer-0", stage, message)
        with pytest.raises(type(error), match=str(error)):
            fleet.reconcile()


def test_so_many_nodes_are_replaced_and_no_more(cloud: Cloud) -> None:
    with fleet_of(cloud, replace(CONFIG, replacements=1)) as fleet:
        cloud.becomes("generation-0", Stage.RECLAIMED, "it is reclaimed")
        until(fleet, lambda: cloud.newest("generation-0") == "generation-0/1")
        cloud.up()
        fleet.reconcile()
        cloud.becomes("generation-0", Stage.RECLAIMED, "it is reclaimed")
        fleet.reconcile()
        assert any("no replacement is left (provision.replacements=1)" in line for line in cloud.said)
        cloud.becomes("trainer-0", Stage.RECLAIMED, "it is reclaimed")
        with pytest.raises(
            ProcessError, match=r"^trainer-0: it is reclaimed; no replacement is left \(provision\.replacements=1\)"
        ):
            fleet.reconcile()


def test_share_that_could_not_be_given_out_is_given_out_later(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(cloud) as fleet:
        cloud.becomes("generation-0", Stage.FAILED, "its processes died")
        with monkeypatch.context() as away:
            away.setattr(cloud, "submit", MagicMock(side_effect=OSError("Prefect is away")))
            for _ in range(5):
                with pytest.raises(OSError, match="away"):
                    fleet.reconcile()
        fleet.reconcile()
        assert cloud.newest("generation-0") == "generation-0/1"
        assert next(share for share in fleet.shares if share.name == "generation-0").failures == 1


def test_given_hosts_are_not_replaced(cloud: Cloud) -> None:
    with fleet_of(cloud, given=True) as fleet:
        cloud.pass_s(fleet, 31)
        cloud.silence[cloud.node("generation-0")] = 1000.0
        fleet.reconcile()
        assert any("generation-0 failed for good" in line for line in cloud.said)
        cloud.becomes("trainer-0", Stage.BAD_NODE, "no driver")
        with pytest.raises(ProcessError, match=r"^trainer-0: no driver$"):
            fleet.reconcile()


class AskedToEndError(BaseException):
    """As Prefect raises it in the main thread where the process is sent SIGTERM."""


@pytest.mark.parametrize(
    ("error", "done"),
    [
        (ProvisionError("no"), ["stop", "close"]),
        (LeaseLostError("lost"), []),  # the shares are somebody else's by now
        (AskedToEndError(), ["hand_over", "stop"]),
    ],
)
def test_what_becomes_of_the_shares_of_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, done: list[str]
) -> None:
    calls = MagicMock()
    calls.stop.return_value = True
    monkeypatch.setattr(on_nodes, "Fleet", MagicMock())
    on_nodes.Fleet.return_value.__exit__.return_value = False  # pyright: ignore[reportAttributeAccessIssue]
    shares = MagicMock(stop=calls.stop, close=calls.close)
    supply = MagicMock(hand_over=calls.hand_over)
    with pytest.raises(type(error)), on_nodes._assigned_shares(MagicMock(), [], shares, supply, print):
        raise error
    assert [call[0] for call in calls.method_calls] == done


@pytest.mark.parametrize(("error", "called"), [(ProvisionError("no"), False), (AskedToEndError(), True)])
def test_the_reaper_is_called_where_the_flow_is_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, called: bool
) -> None:
    client = MagicMock()
    client.__enter__.return_value = client
    monkeypatch.setattr(on_nodes, "get_client", lambda **_: client)
    with pytest.raises(type(error)), on_nodes._reap_on_cancel():
        raise error
    assert client.create_flow_run_from_deployment.called is called


def test_a_node_that_does_not_see_the_end_of_its_run_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_S", "_NOTICE_END_S"):
        monkeypatch.setattr(on_nodes, name, 0.01)
    monkeypatch.setattr(on_nodes, "_show_progress", MagicMock())
    config = ProvisionConfig(kind="terraform", image="ami-1", generation=CPU, trainer=CPU)
    work, progress = MagicMock(), MagicMock()
    work.submit = lambda role, index: f"{role}-{index}"
    work.states = lambda ids: {i: ShareState(Stage.DONE if i == "trainer-0" else Stage.RUNNING, None, "") for i in ids}
    progress.cancel_ignored.return_value = False
    with Fleet(config, [], work, None, restarts=0) as fleet:
        on_nodes._watch(fleet, None, progress, MagicMock(), MagicMock())
        assert not fleet.of("generation")[0].state.stage.ended
