"""Shares of a run and the workers that have them; a copy of its folder: made of what the head node serves, followed,
and given back; and the stager, which brings all servers of a machine one copy of each version."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from areal_core.api import head as head_module
from areal_core.api.head import Head
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError, ProcessError, StorageError
from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import Heartbeat
from areal_core.launch.supervisor import StopSignal
from areal_core.run.remote import copied as module
from areal_core.run.remote import stager as stager_module
from areal_core.run.remote.copied import RunCopy, ShareResources
from areal_core.run.remote.share import REPORT_TIMEOUT_S, NodeReport, Nodes, Share, TakenError, share_contents
from areal_core.run.remote.stager import Stager
from areal_core.run.supervision import Supervision
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from tests.support.processes import TIMEOUT_S, wait_for
from tests.support.remote import PATIENCE_S, HeadNode

GENERATION, TRAINER = Share(role="generation", count=1), Share(role="trainer", first=1, count=1)


class Node:
    """A machine with a share of the run, in this process."""

    def __init__(self, head: Head, folder: Path) -> None:
        self.folder = folder
        self.copy = RunCopy(head, folder)
        self.stop = StopSignal()
        self._open = ExitStack()

    def take(self, share: Share = GENERATION) -> ShareResources:
        config = self.copy.find(1.0, self.stop)
        assert config is not None
        self.supervision = Supervision(self.copy.run, config.launch, log=print, forward=print, end=self.stop.set)
        owned = self.copy.own_share(share, config, "127.0.0.1", supervision=self.supervision, stop=self.stop)
        return self._open.enter_context(owned)

    def end(self) -> None:
        self.stop.set()
        self._open.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "_SEND_S", 0.05)
    monkeypatch.setattr(module, "_FINAL_REPORT_S", 1.0)
    monkeypatch.setattr(head_module, "_RETRY_S", 0.01)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(head: Head, folder: str = "node") -> Node:
        made.append(Node(head, tmp_path / folder))
        return made[-1]

    yield make
    for one in made:
        one.end()
    names = ("follow", "send", "stager")
    assert not [thread for thread in threading.enumerate() if thread.name in names]


def test_a_copy_has_what_processes_read(head_node: HeadNode, node: Callable[..., Node]) -> None:
    machine = node(head_node.head())
    run = machine.take().run
    assert run.root == machine.folder / "runs" / "r"
    assert run.token() == head_node.run.token()
    assert run.config() == dataclasses.replace(head_node.config, state_dir=str(machine.folder))
    assert run.info() == dataclasses.replace(head_node.run.info(), model_path=str(run.root / "model"))
    for file in head_node.model.iterdir():
        assert (run.root / "model" / file.name).read_bytes() == file.read_bytes()


def test_files_of_the_model_that_are_whole_are_not_copied_again_and_changed_ones_are_refused(
    head_node: HeadNode, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    fetch = module.fetch

    def counted(head: Head, path: str, *arguments: Any, **options: Any) -> int:
        copied.append(path)
        return fetch(head, path, *arguments, **options)

    monkeypatch.setattr(module, "fetch", counted)
    (head_node.model / "two words.txt").write_text("x")
    head = head_node.head()
    first = node(head)
    model = first.take().run.root / "model"
    first.end()
    assert sorted(copied) == ["/model/config.json", "/model/model.safetensors", "/model/two%20words.txt"]
    (model / "model.safetensors").write_bytes(b"damaged")
    (model / ".arriving").write_bytes(b"half")
    (model / "of-another-model.txt").touch()
    copied.clear()
    again = node(head)
    again.take()
    again.end()
    assert copied == ["/model/model.safetensors"]
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors", "two words.txt"]
    (head_node.model / "config.json").write_text("changed")
    (model / "config.json").unlink()
    with pytest.raises(StorageError, match=r"^http://\S+/model/config\.json: must have digest "):
        node(head).take()


def test_ready_files_and_pulses_go_both_ways(head_node: HeadNode, node: Callable[..., Node]) -> None:
    there = head_node.run
    write_json(there.ready_file("controller"), {"pid": 1, "url": "http://c:1"})
    here = node(head_node.head()).take().run
    wait_for(lambda: here.controller_url() == "http://c:1")
    write_json(there.ready_file("controller"), {"pid": 2, "url": "http://c:2"})
    write_json(there.ready_file("trainer", 1), {"pid": 3, "url": None})
    wait_for(lambda: here.controller_url() == "http://c:2" and here.ready_info("trainer", 1))
    there.ready_file("controller").unlink()
    wait_for(lambda: here.controller_url() is None)
    there.numbered(3)  # another launcher goes on with the run
    wait_for(lambda: here.info().number == 3)
    write_json(here.ready_file("generation"), {"pid": 9, "url": "http://g:1"})
    beat = Heartbeat(pid=9, beats=1, turns=1, progress=4, doing="x" * 500, waits_for=None)
    heartbeat.write(here.heartbeat_file("generation"), beat)
    wait_for(lambda: there.ready_info("generation") == {"pid": 9, "url": "http://g:1"})
    wait_for(lambda: heartbeat.read(there.heartbeat_file("generation")) == dataclasses.replace(beat, doing="x" * 200))
    here.ready_file("generation").unlink()
    wait_for(lambda: there.ready_info("generation") is None)


def test_a_machine_that_trains_keeps_its_own_ranks_ready_files(head_node: HeadNode, node: Callable[..., Node]) -> None:
    there = head_node.run
    lease = Path(there.info().checkpoint_url, "lease.json")
    lease.parent.mkdir(parents=True)
    lease.write_text("{}")
    here = node(head_node.head()).take(TRAINER).run
    own, other = {"pid": 9, "url": None}, {"pid": 4, "url": "tcp://h:1"}
    write_json(here.ready_file("trainer", 1), own)
    wait_for(lambda: there.ready_info("trainer", 1) == own)
    for role in ("trainer", "rendezvous"):
        write_json(there.ready_file(role), other)
    wait_for(lambda: here.ready_info("trainer") == here.ready_info("rendezvous") == other)
    assert here.ready_info("trainer", 1) == own


def test_data_server_that_was_just_started_again_has_what_processes_write(
    head_node: HeadNode, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = node(head_node.head())
    here = machine.take().run
    monkeypatch.setattr(module, "POLL_S", 10.0)
    wait_for(lambda: head_node.files.nodes.awaits_reports)
    assert head_node.served is not None
    head_node.serve(int(head_node.served.url.rpartition(":")[2]))  # it knows no share
    here.log_file("generation").write_text("half of the last line")
    machine.end()
    assert head_node.run.log_file("generation").read_text() == "half of the last line"
    assert not head_node.files.nodes.awaits_reports
    assert machine.supervision.failure is None


def test_a_head_node_that_is_away_for_a_while_and_one_that_is_gone(
    head_node: HeadNode, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_TIMEOUT_S", 1.0)
    where = [head_node.serve()]
    machine = node(Head(lambda: where[0], head_node.run.token(), timeout_s=1.0))
    place = machine.take()
    following = place.ended.__self__  # type: ignore[attr-defined]
    log, written = head_node.run.log_file("generation"), ""
    for outage in range(3):  # longer than that all together
        head_node.close()
        written += f"in outage {outage}\n"
        place.run.log_file("generation").write_text(written)
        wait_for(lambda: following._silent_s > 0.5)
        assert not place.ended()
        where[0] = head_node.serve()
        wait_for(lambda written=written: log.exists() and log.read_text() == written)
        wait_for(lambda: following._silent_s == 0.0)
    head_node.close()
    with pytest.raises(
        ProcessError, match=r"^the head node has not responded for 1 s: run r has ended, or is unreachable$"
    ):
        wait_for(place.ended)
    assert machine.supervision.failure is None


def test_another_run_at_the_same_address(head_node: HeadNode, node: Callable[..., Node]) -> None:
    machine = node(head_node.head())
    machine.take()
    head_node.files._read_at = float("inf")
    head_node.files._state["run_id"] = "other"
    wait_for(lambda: machine.supervision.failure)
    assert str(machine.supervision.failure) == "the head node now runs other: run r has ended"


def test_a_share_that_another_machine_has_until_it_leaves(
    head_node: HeadNode, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLAIM_S", 0.2)
    head = head_node.head()
    first = node(head, "first")
    first.take()
    with pytest.raises(ProcessError, match=r"^--head: generation 0 of run r already runs under another command"):
        node(head, "second").take()
    monkeypatch.setattr(module, "_CLAIM_S", PATIENCE_S)
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(node(head, "third").take)
        first.end()
        assert taking.result(PATIENCE_S)


def test_a_folder_is_one_commands(
    head_node: HeadNode, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OWNER_S", -head_node.config.launch.stop_timeout_s)
    place = node(head_node.head()).take()
    assert len(place.locks) == 1
    with pytest.raises(ProcessError, match=r"^--folder: another command uses .*/runs/r; give"):
        node(head_node.head()).take()


def test_bad_options_are_refused_before_anything_is_begun(
    head_node: HeadNode, node: Callable[..., Node], tmp_path: Path
) -> None:
    head = head_node.head()
    (tmp_path / "file").touch()
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: node(head).take(TRAINER),
            r"storage\.url: must be a store that .*, got .*/store/runs/r, which holds no lease",
        ),
        (lambda: node(Head(head.url, "another")).take(), r"--token-file: http://\S+ refuses this token"),
        (lambda: node(head, "file/node").take(), r"--folder: can't create .*/file/node/runs/r: Not a directory$"),
    ]
    for action, line in cases:
        with pytest.raises((ConfigError, StorageError), match=f"^{line}"):
            action()


WRONG: dict[str, Any] = {"run_id": "../../etc", "ended": None, "config": {}, "info": {}, "model": {}}


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ({}, r"GET /run of http://\S+ returned status 200 and no description of a run$"),
        (WRONG, r"^--head: a run or a file of its model has an invalid name"),
        (
            WRONG | {"run_id": "r", "model": {"../token": {}}},
            r"^--head: a run or a file of its model has an invalid name",
        ),
    ],
)
def test_answers_of_other_servers_are_refused(
    node: Callable[..., Node], serve: Any, about: dict[str, Any], line: str
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(about)

    def make() -> web.Application:
        app = web.Application()
        app.router.add_get("/run", answer)
        return app

    with pytest.raises(ConfigError, match=line):
        node(Head(serve(make), "t")).copy.find(1.0, StopSignal())


@pytest.fixture
def copy(head_node: HeadNode, tmp_path: Path) -> RunDir:
    """The copy of the run's folder on another machine."""
    config = dataclasses.replace(head_node.config, state_dir=str(tmp_path / "node"))
    return RunDir.create(config, RunInfo(run_id="r", model_path=str(head_node.model), checkpoint_url="/store/r"))


class Fetching:
    """Stands in for a download: counts, and holds each until `go_on` is set."""

    def __init__(self, versions: Path) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.damaged = False
        self._versions = versions

    def __call__(self, source: Head, path: str, file: Path, digest: str, **_: Any) -> None:
        number = path.removeprefix("/versions/").partition("?")[0]
        file.write_bytes(weights.weights_file(weights.version_folder(self._versions, int(number))).read_bytes())
        self.asked.append(number)
        self.go_on.wait(TIMEOUT_S)
        if self.damaged:
            raise StorageError(f"{path} is damaged")


@pytest.fixture
def fetching(head_node: HeadNode, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    made = Fetching(head_node.run.weights)
    monkeypatch.setattr(stager_module, "fetch", made)
    return made


@pytest.fixture
def stager(copy: RunDir, fetching: Fetching) -> Iterator[Stager]:
    yield Stager(copy, Head("http://10.0.0.1:1", "token"), "127.0.0.1", kept=2)
    fetching.go_on.set()


def held(copy: RunDir) -> list[str]:
    return sorted(str(path.relative_to(copy.weights)) for path in copy.weights.rglob("*") if path.is_file())


async def test_servers_that_ask_at_once_wait_for_one_download_though_one_gives_up(
    stager: Stager, fetching: Fetching, head_node: HeadNode, copy: RunDir
) -> None:
    made = head_node.publish(3)
    fetching.go_on.clear()
    gives_up, *asking = (asyncio.ensure_future(stager.staged(made)) for _ in range(8))
    while not fetching.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert held(copy) == [f".v3.{made.digest[:16]}"]  # not there before it is whole
    gives_up.cancel()
    fetching.go_on.set()
    found = await asyncio.gather(*asking)
    assert fetching.asked == ["3"]
    [here] = set(found)
    assert here == weights.read_manifest(weights.version_folder(copy.weights, 3))
    assert (here.version, here.digest) == (3, made.digest)
    assert here.path != made.path
    assert weights.is_whole(here)
    assert await stager.staged(made) == here
    assert fetching.asked == ["3"]


async def test_those_that_were_asked_for_last_stay(stager: Stager, head_node: HeadNode, copy: RunDir) -> None:
    made = [head_node.publish(number) for number in range(1, 4)]
    for version in (*made[:2], made[0], made[2]):
        await stager.staged(version)
    assert held(copy) == [f"v00000{n}/{name}" for n in (1, 3) for name in ("manifest.json", "model.safetensors")]


async def test_the_base_model_is_the_machines_own(stager: Stager, fetching: Fetching, head_node: HeadNode) -> None:
    base = weights.base_version(str(head_node.model))
    elsewhere = dataclasses.replace(base, path="/elsewhere")
    assert await stager.staged(elsewhere) == base
    with pytest.raises(StorageError, match=r"^model\.path: must be .* with digest 0{64}, got .*; copy it here$"):
        await stager.staged(dataclasses.replace(base, digest="0" * 64))
    assert not fetching.asked


async def test_damaged_weights_leave_nothing(
    stager: Stager, fetching: Fetching, head_node: HeadNode, copy: RunDir
) -> None:
    made = head_node.publish(3)
    fetching.damaged = True
    with pytest.raises(StorageError, match="is damaged"):
        await stager.staged(made)
    assert held(copy) == []
    fetching.damaged = False
    assert weights.is_whole(await stager.staged(made))


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
    its = share_contents(settings, share.with_count(settings))
    assert its.processes == processes
    assert {f"{folder}/{name.rpartition('.')[0]}" for folder, name in its.files} == files


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (Share(role="evaluator"), r"launch\.remote_roles: must be evaluator or both"),
        (Share(role="trainer"), r"--node: must be from 1 to 1 \(training\.hosts=2; node 0 is the head node\), got 0"),
        (Share(role="rewards", first=4000, count=97), "--first, --workers: must add up to at most 4096, got 4097"),
        (Share(role="generation", first=3), "--first: servers 3 to 5 are more than the run has, 3 "),
    ],
)
def test_what_is_no_share_of_the_run(share: Share, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        share.with_count(config())


# -- the workers that have them ----------------------------------------------------------------------------------------


def said(first: int = 0, count: int = 1, role: str = "generation", **fields: Any) -> NodeReport:
    values = {"role": role, "first": first, "count": count, "address": "10.0.0.2"} | fields
    return msgspec.convert(values, NodeReport)


def test_a_share_is_one_workers_until_it_is_silent_for_too_long(head_node: HeadNode) -> None:
    clock = SimpleNamespace(now=1000.0)
    nodes = Nodes(head_node.run, head_node.config, lambda: clock.now)
    nodes.handle_report("a", said(0, 2))
    with pytest.raises(
        TakenError, match=r"^--head: generation 1 of run r already runs under another command, at 10\.0\.0\.2$"
    ):
        nodes.handle_report("b", said(1))
    nodes.handle_report("t", said(1, role="trainer"))  # another role
    clock.now += REPORT_TIMEOUT_S - 1
    nodes.handle_report("a", said(0, 2))
    clock.now += REPORT_TIMEOUT_S - 1
    with pytest.raises(TakenError):
        nodes.handle_report("b", said(1))
    clock.now += 1
    nodes.handle_report("b", said(1))
    assert nodes.contents_of("a") is None
    with pytest.raises(TakenError):  # it comes back
        nodes.handle_report("a", said(0, 2))
