"""Remote workers of a run, all on one machine, each with a copy of the run's folder in a folder of its own; tests/hosts
has them on machines of their own."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.launch.supervisor import FileLock
from areal_core.run.launcher import run_folder
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import read_timeline
from areal_core.types import PolicyVersion
from tests.support.processes import TIMEOUT_S, free_port, kill_all, marked
from tests.support.runs import Launched, learning, tiny
from tests.support.trajectories import PublishedWeights, ServerView, audited, check_trajectories, has_come_back

pytestmark = pytest.mark.recovery

LAUNCH: dict[str, Any] = {"devices": 4, "stop_timeout_s": 10.0}


class Node:
    """A remote worker with a folder of its own."""

    def __init__(self, command: list[str], folder: Path, mark: str) -> None:
        self.folder = folder
        self._mark = mark
        folder.mkdir(parents=True)
        self.output = folder / "output.txt"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "--folder", str(folder)],
                env={**os.environ, "AREAL_TEST_NODE": mark},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def copy(self, run: Launched) -> RunDir:
        return RunDir(self.folder / "runs" / run.run.root.name)

    def ended(self) -> tuple[int, str]:
        """Its exit status and last line; nothing that it started may be left."""
        status = self.process.wait(TIMEOUT_S)
        assert not self.processes(), self.output.read_text()
        return status, self.output.read_text().splitlines()[-1]

    def processes(self) -> list[int]:
        return marked("AREAL_TEST_NODE", self._mark)


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`python -m areal_core.run.remote_worker` for a run."""
    started: list[Node] = []

    def command(run: Launched, role: str, *options: object) -> Node:
        head = run.wait_for("its data server listens", lambda: (run.run.ready_info("files") or {}).get("url"))
        where = ("--head", head, "--token-file", run.run.token_file, "--address", "127.0.0.1")
        argv = [sys.executable, "-m", "areal_core.run.remote_worker", role, *map(str, (*where, *options))]
        started.append(Node(argv, tmp_path / f"node-{len(started)}", secrets.token_hex(8)))
        return started[-1]

    yield command
    for node in started:
        kill_all(node.processes)
        node.process.wait()


def held(config: RunConfig, run: RunDir) -> dict[int, str]:
    """The hashes of versions in the ledger."""
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    try:
        found = [ledger.versions.get(version) for version in range(config.training.steps + 1)]
        return {version.version: version.digest for version in found if version is not None}
    finally:
        ledger.close()


@pytest.mark.nightly
def test_servers_of_other_machines_die_leave_and_are_replaced(tmp_path: Path, start: Start) -> None:
    launch = LAUNCH | {"remote_roles": "generation"}
    evaluation = {"every": 12, "servers": 0}  # which borrows one, and has it load versions
    config = audited(
        tmp_path / "head", servers=2, interruption="recompute", steps=48, launch=launch, evaluation=evaluation
    )
    with Launched(config, "apart") as run, PublishedWeights(run) as published:
        stays, leaves = (start(run, "generation", "--first", first, "--servers", 1) for first in range(2))
        run.until_step(2)
        lost = run.pid("generation", 0)
        assert lost in stays.processes()
        os.kill(lost, signal.SIGKILL)
        has_come_back(run, 0, but=lost)
        for role in ("controller", "files"):
            ended, where = run.pid(role), run.url(role)
            os.kill(ended, signal.SIGKILL)
            run.pid(role, but=ended)
            assert run.url(role) == where
            run.until_step(run.step() + 2)
        server = ServerView(run.url("generation", 1), run.run.token())
        run.wait_for("it decodes", lambda: server.running() >= 2)
        leaves.process.send_signal(signal.SIGUSR1)
        assert leaves.ended() == (0, "this machine leaves the run: it received SIGUSR1")
        assert "generation-1 has left the run" in leaves.output.read_text()
        replaces = start(run, "generation", "--first", 1, "--servers", 1)
        run.wait_for(
            "another server is in its place",
            lambda: (run.run.ready_info("generation", 1) or {}).get("pid") in replaces.processes(),
        )
        replacement = ServerView(run.url("generation", 1), run.run.token())
        run.wait_for("the one in its place samples", lambda: replacement.generated() > 0)
        run.finished()
        for node in (stays, replaces):
            assert node.ended() == (0, "run apart has ended")
    check_trajectories(run, published, interrupted=False)
    scored = {path.name[:7] for path in run.run.evaluations.glob("v*.jsonl")}  # those between, as far as it came
    assert {"v000000", "v000048"} <= scored
    hashes = held(config, run.run)
    for node in (stays, replaces):
        copy = node.copy(run)
        here = [weights.read_manifest(path) for path in sorted(copy.weights.glob("v*"))]
        assert here
        for version in here:
            assert weights.is_whole(version)
            assert version.digest == hashes[version.version]
            assert version.path.startswith(str(node.folder))
        assert FileLock.is_held(copy.root / "copy.lock") is False
    logs = run.run.logs
    assert "the controller removed" not in (logs / "host-generation-1.log").read_text()
    assert "generation-0 was killed by SIGKILL: restart 1 of 2" in (logs / "host-generation-0.log").read_text()
    assert "this machine leaves the run" in (logs / "host-generation-1.log").read_text()
    spans = read_timeline(run.run.timeline)
    for index, nodes in ((0, [stays]), (1, [leaves, replaces])):
        own = [span for node in nodes for span in read_timeline(node.copy(run).timeline)]
        assert own
        assert [span for span in spans if span.process == f"generation-{index}"] == own


def test_rank_0_on_another_machine_makes_the_same_weights(tmp_path: Path, start: Start) -> None:
    """Also where the data server and rank 0 are killed: rank 0 resumes, and the head node has every version."""

    def config(machine: str, **launch: Any) -> RunConfig:
        return learning(
            tmp_path / machine,
            mode="sync",
            training={"steps": 16},
            generation={"servers": 1},
            launch=LAUNCH | launch,
            storage={"url": str(tmp_path / "store" / machine)},
        )

    with Launched(config("one"), "alone") as run:
        alone = Path(run.finished().model_url, "model.safetensors").read_bytes()
    with Launched(config("head", remote_roles="trainer", head_trains=False), "apart") as run:
        node = start(run, "trainer", "--node", 0)
        run.until_step(4)
        rank = run.pid("trainer")
        assert rank in node.processes()
        for role in ("files", "trainer"):
            ended = run.pid(role)
            os.kill(ended, signal.SIGKILL)
            run.pid(role, but=ended)
        summary = run.finished()
        assert node.ended() == (0, "run apart has ended")
        assert Path(summary.model_url, "model.safetensors").read_bytes() == alone
        hashes = held(run.run.config(), run.run)
    kept = {version: weights.version_folder(run.run.weights, version) for version in hashes if version}
    assert 16 in kept
    for version, folder in kept.items():
        assert weights.is_whole(PolicyVersion(version=version, path=str(folder), digest=hashes[version]))
    assert not weights.version_folder(run.run.weights, 1).exists()  # released there, too
    spans = {(span.process, span.kind) for span in read_timeline(run.run.timeline)}
    assert {("trainer-0", "train"), ("publisher-0", "publish")} <= spans


@pytest.mark.nightly
def test_another_head_node_goes_on_with_the_machines_of_one_that_is_lost(tmp_path: Path, start: Start) -> None:
    launch = LAUNCH | {"remote_roles": "generation", "files_port": free_port()}

    def config(machine: str) -> RunConfig:
        storage = {"url": str(tmp_path / "store"), "lease_s": 4.0}
        return tiny(
            tmp_path / machine, training={"steps": 40}, launch=launch, storage=storage, evaluation={"enabled": False}
        )

    with Launched(config("first"), "apart") as run:
        node = start(run, "generation")
        store = Storage.open(run.run.info().checkpoint_url)
        run.wait_for("a checkpoint", lambda: checkpoint.newest(store))
        server, token = run.pid("generation"), run.run.token()
        run.launcher.send_signal(signal.SIGSTOP)
        os.kill(run.pid("files"), signal.SIGKILL)  # which says nothing more, as on a machine that loses power
        kill_all(run.processes)
    there = run_folder(config("second"), "apart")
    there.keep_token(token)
    with Launched(config("second"), "apart") as run:
        summary = run.finished(rewound=True)
        assert node.ended() == (0, "run apart has ended")
    assert summary.steps == 40
    assert (node.copy(run).ready_info("generation") or {})["pid"] == server  # it has gone on
    assert "resumed from the checkpoint of step" in (run.run.logs / "trainer-0.log").read_text()
    here = (node.copy(run).timeline / "generation-0.jsonl").read_bytes()
    assert (run.run.timeline / "generation-0.jsonl").read_bytes() == here
