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

from areal_core.errors import ProcessError
from areal_core.launch.supervisor import FileLock, RoleSpec
from areal_core.run import registration
from areal_core.run import remote_worker as command
from areal_core.run.remote import folder as places
from areal_core.run.remote_worker import RemoteWorker, Share, SharedFolder
from areal_core.run.roles import remote_generation
from areal_core.storage.rundir import RunDir, write_json
from tests.support.head_node import PATIENCE_S, HeadNode, wait_for

SERVER = """
import os, sys, time
from pathlib import Path
from areal_core.launch import process
process.adopt(Path(sys.argv[1]))
if sys.argv[2] == "fails":
    sys.exit("no memory today")
process.announce_ready(Path(sys.argv[1]), f"http://{os.getpid()}.test")
time.sleep(600)
"""


@pytest.fixture
def head_node(tmp_path: Path) -> Iterator[HeadNode]:
    made = HeadNode(tmp_path)
    yield made
    made.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "launch", "line"),
    [
        ([], {}, "the following arguments are required: role"),
        (["generation"], {}, "the following arguments are required: --address"),
        (
            ["generation", "--address", "here"],
            {},
            "argument --address: must be an IP address, got 'here'; "
            "see python -m areal_core.run.remote_worker generation --help",
        ),
        (
            ["trainer", "--address", "203.0.113.9"],
            {},
            "--address: no network interface of this machine has 203.0.113.9",
        ),
        (
            ["generation", "--address", "127.0.0.1"],
            {"remote_roles": "trainer"},
            "launch.remote_roles: must be generation or both for another machine to take that role over, got 'trainer'",
        ),
        (
            ["trainer", "--address", "127.0.0.1", "--node", "1"],
            {},
            "--node: must be at most 0 (training.hosts), got 1",
        ),
        (
            ["generation", "--address", "127.0.0.1", "--first", "1"],
            {},
            "--first: servers 1 to 3 are more than the run has, 3 (generation.servers)",
        ),
        (
            ["generation", "--address", "127.0.0.1", "--servers", "0"],
            {},
            "argument --servers: must be a whole number, 1 at least, got '0'",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], launch: dict[str, Any], line: str
) -> None:
    head_node = HeadNode(tmp_path, **launch)
    if "--address" in arguments:
        arguments = [*arguments, "--run-dir", str(head_node.run.root)]
    assert command.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"areal: error: {line}")


def test_a_controller_that_no_other_machine_reaches_is_refused(
    head_node: HeadNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "interface", lambda address: "eth0")
    assert command.main(["generation", "--run-dir", str(head_node.run.root), "--address", "203.0.113.9"]) == 2
    assert "launch.address: must be an address that other machines reach, got '127.0.0.1'" in capsys.readouterr().err


def test_a_run_without_a_launcher(head_node: HeadNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head_node.end(summary=False)
    for folder in (head_node.run.root, tmp_path / "nowhere"):
        options = ("--run-dir", str(folder), "--address", "127.0.0.1", "--wait", "0.1")
        assert command.main(["generation", *options]) == 2
        assert f"--run-dir: nobody has started a run in {folder} within 0.1 s" in capsys.readouterr().err


def test_an_address_that_the_head_node_can_not_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head_node = HeadNode(tmp_path, address="203.0.113.1")
    assert command.main(["generation", "--run-dir", str(head_node.run.root), "--address", "127.0.0.1"]) == 2
    line = "--address: must be an address that the head node, 203.0.113.1, reaches, got '127.0.0.1'"
    assert line in capsys.readouterr().err


def test_the_loopback_will_do_on_the_head_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head_node = HeadNode(tmp_path, address="203.0.113.1", stop_timeout_s=0.1)
    monkeypatch.setattr(command, "interface_of", lambda address: "lo" if address == "203.0.113.1" else None)
    monkeypatch.setattr(places, "_OWNER_S", 0.0)
    with FileLock(head_node.run.root / "host-trainer-0.lock", timeout_s=0.0, busy=""):  # so that nothing is started
        assert command.main(["trainer", "--run-dir", str(head_node.run.root), "--address", "127.0.0.1"]) == 1
    assert "is run by another command already" in capsys.readouterr().err


def test_a_run_that_has_ended_is_not_waited_for(head_node: HeadNode, capsys: pytest.CaptureFixture[str]) -> None:
    head_node.end(summary=True)
    assert command.main(["generation", "--run-dir", str(head_node.run.root), "--address", "127.0.0.1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["run r has ended"]


def test_shares_that_overlap_refuse_each_other(
    head_node: HeadNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "_OWNER_S", -head_node.config.launch.stop_timeout_s)
    options = ("--run-dir", str(head_node.run.root), "--address", "127.0.0.1")
    with FileLock(head_node.run.root / "host-generation-1.lock", timeout_s=0.0, busy=""):  # --first 1 --servers 1
        assert command.main(["generation", *options, "--first", "0", "--servers", "2"]) == 1
    assert "--run-dir: generation 1 of run r is run by another command already" in capsys.readouterr().err


def test_a_share_has_one_command(
    head_node: HeadNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "_OWNER_S", -head_node.config.launch.stop_timeout_s)
    with FileLock(head_node.run.root / "host-trainer-0.lock", timeout_s=0.0, busy=""):
        assert command.main(["trainer", "--run-dir", str(head_node.run.root), "--address", "127.0.0.1"]) == 1
    assert "--run-dir: trainer 0 of run r is run by another command already" in capsys.readouterr().err


# -- a part in a run ---------------------------------------------------------------------------------------------------


class Part:
    """A remote worker of generation, with stand-ins for servers, in a thread of this process."""

    def __init__(
        self,
        head_node: HeadNode,
        patch: pytest.MonkeyPatch,
        *,
        first: int = 0,
        count: int = 1,
        server: str = "serves",
    ):
        def spec(run: RunDir, *arguments: Any, **options: Any) -> RoleSpec:
            def argv(index: int) -> list[str]:
                return [sys.executable, "-c", SERVER, str(run.ready_file("generation", index)), server]

            return dataclasses.replace(remote_generation(run, *arguments, **options), argv=argv)

        patch.setattr(command, "remote_generation", spec)
        self.lines: list[str] = []
        self.head_node = head_node
        share = Share(role="generation", first=first, count=count)
        self.worker = RemoteWorker(share, SharedFolder(head_node.run), "127.0.0.1", log=self.lines.append)
        self._thread = ThreadPoolExecutor(1)
        self.running = self._thread.submit(self.worker.work)

    def end(self) -> BaseException | None:
        error = self.running.exception(PATIENCE_S)
        self._thread.shutdown()
        infos = [json.loads(file.read_text()) for file in self.head_node.run.ready.glob("generation-*.json")]
        assert not any(Path(f"/proc/{info['pid']}").exists() for info in infos)
        assert not [thread for thread in threading.enumerate() if thread.name in ("register", "watch")]
        return error


@pytest.fixture
def part(head_node: HeadNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Part]]:
    made: list[Part] = []

    def make(**options: Any) -> Part:
        made.append(Part(head_node, monkeypatch, **options))
        return made[-1]

    yield make
    write_json(head_node.run.summary, {})  # whatever the test did: it ends now
    for one in made:
        one.running.exception(PATIENCE_S)


def test_servers_join_once_the_trainer_is_ready_and_end_with_the_run(
    head_node: HeadNode, part: Callable[..., Part]
) -> None:
    controller = head_node.start_controller()
    played = part(first=1, count=2)
    wait_for(lambda: all(head_node.run.ready_info("generation", index) for index in (1, 2)))
    assert not controller.joined
    head_node.trainer_is_ready()
    wait_for(lambda: len(controller.joined) == 2)
    assert {name for name, _ in controller.joined} == {"generation-1", "generation-2"}
    head_node.end(summary=True)
    assert played.end() is None
    assert played.lines[-1] == "run r has ended"


def test_servers_join_a_controller_that_was_started_again(head_node: HeadNode, part: Callable[..., Part]) -> None:
    head_node.trainer_is_ready()
    first = head_node.start_controller()
    played = part()
    wait_for(lambda: first.joined)
    second = head_node.start_controller()
    wait_for(lambda: second.joined)
    assert second.joined == first.joined
    head_node.end(summary=True)
    assert played.end() is None


def test_a_server_that_was_lost_is_started_again_and_joins_anew(head_node: HeadNode, part: Callable[..., Part]) -> None:
    head_node.trainer_is_ready()
    controller = head_node.start_controller()
    played = part()
    wait_for(lambda: controller.joined)
    name, url = controller.joined[0]
    head_node.lost.extend(["http://another.test", url])
    wait_for(lambda: len(controller.joined) > 1)
    assert controller.joined[-1][0] == name
    assert controller.joined[-1][1] != url
    assert f"the generation server at {url} was taken out by the controller: killed" in played.lines
    head_node.end(summary=True)
    assert played.end() is None


def test_a_server_that_is_slow_to_join_keeps_no_lost_one_from_being_started_again(
    head_node: HeadNode, part: Callable[..., Part]
) -> None:
    head_node.trainer_is_ready()
    head_node.slow.add("generation-0")
    controller = head_node.start_controller()
    played = part(count=2)
    wait_for(lambda: "generation-1" in dict(controller.joined))
    url = dict(controller.joined)["generation-1"]
    head_node.lost.append(url)
    wait_for(lambda: dict(controller.joined)["generation-1"] != url)
    registered = len(controller.joined)
    wait_for(lambda: len(controller.joined) > registered)  # the slow one is registered again
    assert {name for name, _ in controller.joined[registered:]} == {"generation-0"}
    head_node.slow.clear()
    wait_for(lambda: len(controller.joined) > registered + 1)
    head_node.end(summary=True)
    assert played.end() is None


def test_a_run_that_ends_without_a_summary(
    head_node: HeadNode, part: Callable[..., Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_NO_LAUNCHER_S", 0.2)
    played = part()
    wait_for(lambda: head_node.run.ready_info("generation"))
    head_node.end(summary=False)
    error = played.end()
    assert isinstance(error, ProcessError)
    assert str(error) == "run r has ended and left no summary"


def test_a_machine_whose_restarts_are_spent(head_node: HeadNode, part: Callable[..., Part]) -> None:
    error = part(server="fails").end()
    assert isinstance(error, ProcessError)
    assert str(error).startswith("generation-0 exited with code 1 after 2 restarts; ")
    kept = head_node.run.log_file("host-generation").read_text()
    assert "WARNING host-generation-0 generation-0 exited with code 1: restart 2 of 2\n" in kept
    assert str(error).endswith("no memory today")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("where", "thread"),
    [
        ("areal_core.run.remote.folder._Launcher.ended", "watch"),
        ("areal_core.run.remote_worker.ServerRegistration._ready", "register"),
    ],
)
def test_a_thread_that_fails_ends_the_part(
    head_node: HeadNode, part: Callable[..., Part], monkeypatch: pytest.MonkeyPatch, where: str, thread: str
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(where, fails)
    head_node.start_controller()
    error = part().end()
    assert isinstance(error, ProcessError)
    assert str(error) == f"{thread}: RuntimeError: no luck"


def test_servers_hold_the_locks_of_their_share(head_node: HeadNode, part: Callable[..., Part]) -> None:
    path = head_node.run.root / "host-generation-0.lock"
    played = part()
    wait_for(lambda: head_node.run.ready_info("generation"))
    info = head_node.run.ready_info("generation")
    assert info is not None
    held = [os.readlink(fd) for fd in Path(f"/proc/{info['pid']}/fd").iterdir() if fd.exists()]
    assert str(path) in held
    assert FileLock.is_held(path)
    head_node.end(summary=True)
    assert played.end() is None
    assert not FileLock.is_held(path)


def test_a_machine_that_leaves_has_its_servers_leave_first(head_node: HeadNode, part: Callable[..., Part]) -> None:
    head_node.trainer_is_ready()
    controller = head_node.start_controller()
    played = part(count=2)
    wait_for(lambda: len(controller.joined) == 2)
    infos = [head_node.run.ready_info("generation", index) for index in range(2)]
    head_node.on_leave = lambda _: all(Path(f"/proc/{info['pid']}").exists() for info in infos if info)
    played.worker.leave("it is reclaimed")
    assert played.end() is None
    assert played.running.result() == "left"
    assert sorted(controller.left) == [("generation-0", True), ("generation-1", True)]
    assert played.lines[-1] == "this machine leaves the run: it is reclaimed"
    assert len(controller.joined) == 2


def test_a_machine_that_leaves_a_run_without_a_controller_ends_all_the_same(
    head_node: HeadNode, part: Callable[..., Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_RESPONSE_S", 0.1)
    known, server_ready = threading.Event(), registration.ServerRegistration.server_ready

    def noticed(self: registration.ServerRegistration, index: int, info: dict[str, Any]) -> None:
        server_ready(self, index, info)
        known.set()

    monkeypatch.setattr(registration.ServerRegistration, "server_ready", noticed)
    played = part()
    wait_for(known.is_set)
    played.worker.leave("it is reclaimed")
    assert played.end() is None
    assert played.running.result() == "left"
    assert any(line.startswith("generation-0 ends without having left the run") for line in played.lines)


def test_who_leaves_before_there_is_a_run_waits_for_none(tmp_path: Path) -> None:
    worker = RemoteWorker(Share(role="generation"), SharedFolder(RunDir(tmp_path / "r")), "127.0.0.1")
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(worker.work)
        worker.leave("it is reclaimed")
        assert working.result(PATIENCE_S) == "left"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "--run-dir, --head: one of them must be given"),
        (["--run-dir", ".", "--head", "http://10.0.0.1:1"], "--run-dir, --head: one of them must be given"),
        (["--head", "http://10.0.0.1:1"], "--token-file, --folder: must be given with --head"),
        (
            ["--head", "http://10.0.0.1:1", "--token-file", "nowhere", "--folder", "x"],
            "--token-file: can't read nowhere",
        ),
        (
            ["--head", "10.0.0.1:1", "--token-file", "TOKEN", "--folder", "x"],
            "--head: must be the URL of the head node's",
        ),
        (["--head", "http://a:b@10.0.0.1:1", "--token-file", "TOKEN", "--folder", "x"], "--head: must hold no user or"),
    ],
)
def test_where_the_run_is_must_be_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], line: str
) -> None:
    token = tmp_path / "token"
    token.write_text("t\n")
    given = [str(token) if option == "TOKEN" else option for option in options]
    assert command.main(["generation", "--address", "127.0.0.1", *given]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"areal: error: {line}")
