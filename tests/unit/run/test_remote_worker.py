"""Remote workers: what is refused, and their part in a run from its start to its end."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.head import Head
from areal_core.config.schema import load
from areal_core.errors import ConfigError, ProcessError
from areal_core.launch.supervisor import RoleSpec
from areal_core.run import registration
from areal_core.run import remote_worker as command
from areal_core.run.remote import copied
from areal_core.run.remote_worker import RemoteWorker, RunCopy, Share
from areal_core.run.roles import generation
from areal_core.storage.rundir import RunDir, write_json
from tests.support.processes import wait_for
from tests.support.remote import PATIENCE_S, HeadNode

SERVER = """
import os, sys, time
from pathlib import Path
from areal_core.launch import process
process.tie_to_parent(Path(sys.argv[1]))
if sys.argv[2] == "fails":
    sys.exit("no memory today")
process.announce_ready(Path(sys.argv[1]), f"http://{os.getpid()}.test")
time.sleep(600)
"""


Options = Callable[[], list[str]]


@pytest.fixture
def options(head_node: HeadNode, tmp_path: Path) -> Options:
    """Those that every command needs."""

    def made() -> list[str]:
        where = ("--head", head_node.serve(), "--token-file", str(head_node.run.token_file))
        return [*where, "--folder", str(tmp_path / "node"), "--address", "127.0.0.1"]

    return made


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trainer"], "the following arguments are required: --head, --token-file, --folder, --address, --node"),
        (["generation", "OPTIONS", "--address", "203.0.113.9"], "--address: no network interface of this machine has"),
        (["generation", "OPTIONS", "--first", "1"], "--first: servers 1 to 2 are more than the run has, 2 (generation"),
        (["generation", "OPTIONS", "--servers", "0"], "argument --servers: must be a whole number of at least 1, got"),
        (["generation", "OPTIONS", "--token-file", "nowhere"], "--token-file: can't read nowhere"),
        (["generation", "OPTIONS", "--head", "http://a:b@10.0.0.1:1"], "--head: must hold no user or"),
        (
            ["generation", "OPTIONS", "--head", "http://127.0.0.1:1", "--wait", "0.1"],
            "--head: no run was started within 0.1 s (--wait): http://127.0.0.1:1 does not",
        ),
    ],
)
def test_what_is_refused(options: Options, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    given = [one for option in arguments for one in (options() if option == "OPTIONS" else [option])]
    assert command.main(given) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"areal: error: {line}")


def test_addresses_by_which_machines_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(head_node: str, here: str) -> None:
        command._check_address(load({"launch": {"address": head_node}}), here)

    with pytest.raises(ConfigError, match=r"^launch\.address: must be an address that other machines reach, got '127"):
        check("127.0.0.1", "203.0.113.9")
    line = r"^--address: must be an address that the head node, 203\.0\.113\.1, reaches, got '127\.0\.0\.1'$"
    with pytest.raises(ConfigError, match=line):
        check("203.0.113.1", "127.0.0.1")
    monkeypatch.setattr(command, "interface_of", lambda address: "eth0" if address == "203.0.113.1" else None)
    check("203.0.113.1", "127.0.0.1")  # on the head node itself


def test_a_run_that_has_ended_is_not_waited_for(
    head_node: HeadNode, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(head_node.run.summary, {})
    assert command.main(["generation", *options()]) == 0
    assert capsys.readouterr().out.splitlines() == ["run r has ended"]


# -- a part in a run ---------------------------------------------------------------------------------------------------


class Part:
    """A remote worker of generation, with stand-ins for servers, in a thread of this process."""

    def __init__(self, head_node: HeadNode, folder: Path, patch: pytest.MonkeyPatch, count: int, server: str) -> None:
        def spec(run: RunDir, *arguments: Any, **options: Any) -> RoleSpec:
            def argv(index: int) -> list[str]:
                return [sys.executable, "-c", SERVER, str(run.ready_file("generation", index)), server]

            return dataclasses.replace(generation(run, *arguments, **options), argv=argv)

        patch.setattr(command, "generation", spec)
        self.lines: list[str] = []
        self.run = RunDir(folder / "runs" / "r")
        share = Share(role="generation", count=count)
        self.worker = RemoteWorker(share, RunCopy(head_node.head(), folder), "127.0.0.1", log=self.lines.append)
        self._thread = ThreadPoolExecutor(1)
        self.running = self._thread.submit(self.worker.work)

    def info(self, index: int = 0) -> dict[str, Any]:
        """The ready file of a server, once it has one."""
        wait_for(lambda: self.run.ready_info("generation", index))
        return self.run.ready_info("generation", index) or {}

    def end(self) -> BaseException | None:
        error = self.running.exception(PATIENCE_S)
        self._thread.shutdown()
        infos = [json.loads(file.read_text()) for file in self.run.ready.glob("generation-*.json")]
        assert not any(Path(f"/proc/{info['pid']}").exists() for info in infos)
        names = ("register", "watch", "follow", "send", "stager")
        assert not [thread for thread in threading.enumerate() if thread.name in names]
        return error


@pytest.fixture
def part(head_node: HeadNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Part]]:
    for module in (command, copied, registration):
        monkeypatch.setattr(module, "POLL_S", 0.1)
    made: list[Part] = []

    def make(count: int = 1, server: str = "serves") -> Part:
        made.append(Part(head_node, tmp_path / "node", monkeypatch, count, server))
        return made[-1]

    yield make
    write_json(head_node.run.summary, {})  # whatever the test did: it ends now
    for one in made:
        one.running.exception(PATIENCE_S)


def test_a_lost_server_is_started_again_though_another_one_is_slow_to_join(
    head_node: HeadNode, part: Callable[..., Part]
) -> None:
    """Servers join once all ranks are ready, and end with the run."""
    head_node.slow.add("generation-0")
    controller = head_node.start_controller()
    played = part(count=2)
    infos = [played.info(index) for index in range(2)]
    held = [os.readlink(fd) for fd in Path(f"/proc/{infos[0]['pid']}/fd").iterdir() if fd.exists()]
    assert str(played.run.root / "copy.lock") in held
    assert not controller.joined
    head_node.ranks_are_ready()
    wait_for(lambda: "generation-1" in dict(controller.joined))
    url = dict(controller.joined)["generation-1"]
    head_node.lost.extend(["http://another.test", url])
    wait_for(lambda: dict(controller.joined)["generation-1"] != url)
    assert f"the controller removed the generation server at {url}: killed" in played.lines
    registered = len(controller.joined)
    wait_for(lambda: len(controller.joined) > registered)  # the slow one is registered again
    assert {name for name, _ in controller.joined[registered:]} == {"generation-0"}
    write_json(head_node.run.summary, {})
    assert played.end() is None
    assert played.lines[-1] == "run r has ended"


def test_a_machine_whose_restarts_are_spent(head_node: HeadNode, part: Callable[..., Part]) -> None:
    error = part(server="fails").end()
    assert isinstance(error, ProcessError)
    assert str(error).startswith("generation-0 exited with code 1 after 2 restarts; ")
    assert str(error).endswith("no memory today")
    kept = head_node.run.log_file("host-generation").read_text()
    assert "WARNING host-generation-0 generation-0 exited with code 1: restart 2 of 2\n" in kept


def test_a_machine_that_leaves_has_its_servers_leave_first(head_node: HeadNode, part: Callable[..., Part]) -> None:
    head_node.ranks_are_ready()
    controller = head_node.start_controller()
    played = part(count=2)
    wait_for(lambda: len(controller.joined) == 2)
    infos = [played.info(index) for index in range(2)]
    head_node.on_leave = lambda _: all(Path(f"/proc/{info['pid']}").exists() for info in infos)
    played.worker.leave("it is reclaimed")
    assert played.end() is None
    assert played.running.result() == "left"
    assert sorted(controller.left) == [("generation-0", True), ("generation-1", True)]
    assert played.lines[-1] == "this machine leaves the run: it is reclaimed"
    assert len(controller.joined) == 2


def test_who_leaves_before_there_is_a_run_waits_for_none(tmp_path: Path) -> None:
    folder = RunCopy(Head("http://127.0.0.1:1", "t"), tmp_path)
    worker = RemoteWorker(Share(role="generation"), folder, "127.0.0.1")
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(worker.work)
        worker.leave("it is reclaimed")
        assert working.result(PATIENCE_S) == "left"
