"""Ranks and torchrun's agents meet at a rendezvous. Errors name a rank that dies or never comes; an agent that ends
leaves the rendezvous open; what others write there is not read."""

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal_core.training.distributed.ranks import rendezvous_of_ranks
from tests.support import forked
from tests.support.processes import wait_for
from tests.support.ranks import summing

PATIENCE_S = 120.0
# One of two agents; its one rank runs the given code.
AGENT = f"""
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from areal_core.training.distributed import node
node.register("token", int(sys.argv[3]))
settings = LaunchConfig(
    min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="r", rdzv_backend=node.BACKEND, rdzv_endpoint=sys.argv[1],
    rdzv_configs={{"is_host": False, "join_timeout": {PATIENCE_S:.0f}, "read_timeout": {PATIENCE_S:.0f},
                  "keep_alive_interval": 1, "keep_alive_max_attempt": 15}},
    max_restarts=0, local_addr="127.0.0.1",
)
try:
    elastic_launch(settings, sys.executable)("-c", sys.argv[2])
except ChildFailedError:
    sys.exit("spent")
"""
WORKS = "import time; print('works', flush=True); time.sleep(600)"


class Rendezvous:
    """The rendezvous process, and the agents that use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        ready = folder / "rendezvous.json"
        options = ("--address", "127.0.0.1", "--ready-file", str(ready))
        self.process = subprocess.Popen([sys.executable, "-m", "areal_core.training.distributed.rendezvous", *options])
        self.wait_for(ready.exists)
        self.where = json.loads(ready.read_text())["url"].removeprefix("tcp://")

    def agent(self, rank: str, *, node: int | None = None) -> Path:
        """Start one, of machine `node`, or of the next; returns the file of its output and of its rank's."""
        number = str(len(self.agents) if node is None else node)
        output = self._folder / f"agent-{len(self.agents)}.txt"
        with output.open("wb") as file:
            command = [sys.executable, "-c", AGENT, self.where, rank, number]
            self.agents.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
        return output

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, lambda: [file.read_text() for file in self._folder.glob("agent-*.txt")])

    def close(self) -> None:
        for agent in self.agents:
            agent.terminate()  # it ends its rank
        for agent in self.agents:
            try:
                agent.wait(PATIENCE_S / 4)
            except subprocess.TimeoutExpired:
                agent.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[Rendezvous]:
    made = Rendezvous(tmp_path)
    yield made
    made.close()


def works(output: Path) -> bool:
    return "works" in output.read_text()


@pytest.mark.recovery
def test_an_agent_that_is_spent_leaves_the_round_open(rendezvous: Rendezvous) -> None:
    stays, spent = rendezvous.agent(WORKS), rendezvous.agent("raise SystemExit(1)")
    assert rendezvous.agents[1].wait(PATIENCE_S) == 1
    # Not necessarily as the last line: torch's timer of heartbeats may be caught by the interpreter's end, and says so.
    assert "spent" in spent.read_text().splitlines()
    again = rendezvous.agent(WORKS, node=1)
    rendezvous.wait_for(lambda: works(again))
    assert works(stays)
    assert rendezvous.agents[0].poll() is None


class Command:
    """As a pickle: a command of a shell."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._text,)


@pytest.mark.attacks
def test_a_state_that_somebody_else_has_written_is_not_unpickled(rendezvous: Rendezvous, tmp_path: Path) -> None:
    address, _, port = rendezvous.where.partition(":")
    attack = pickle.dumps(Command(f"touch {tmp_path}/taken-over"))
    TCPStore(address, int(port)).set("torch.rendezvous.r", base64.b64encode(attack).decode())
    output = rendezvous.agent(WORKS)
    assert rendezvous.agents[0].wait(PATIENCE_S) == 1
    assert "the state of the rendezvous was not written by an agent of this run" in output.read_text()
    assert not (tmp_path / "taken-over").exists()


class Ranks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: dict[int, BaseProcess] = {}

    def start(self, rank: int, size: int, *, where: str | None = None, join_s: float = PATIENCE_S) -> None:
        where = where or str(self._folder / "rendezvous")
        environment = {"AREAL_ADDRESS": f"10.0.0.{rank}", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = (rank, size, where, self._folder / "go", join_s)
        self.started[rank] = forked.start(summing, *arguments, output=self._output(rank), environment=environment)

    def lines(self, rank: int, count: int = 1) -> list[str]:
        """The first lines that a rank prints, once there are as many."""
        said: list[str] = []

        def enough() -> bool:
            said[:] = self._output(rank).read_text().splitlines(keepends=True) if self._output(rank).exists() else []
            return len(said) >= count and said[count - 1].endswith("\n")

        wait_for(enough)
        return [line.strip() for line in said[:count]]

    def go(self) -> None:
        (self._folder / "go").touch()

    def error(self, rank: int) -> str:
        """The last line of a rank that has failed."""
        self.started[rank].join(PATIENCE_S)
        assert self.started[rank].exitcode == 1
        return self._output(rank).read_text().strip().splitlines()[-1]

    def kill(self) -> None:
        for process in self.started.values():
            process.kill()
            process.join()

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.kill()


def test_a_rank_that_has_died_is_named(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.start(rank, 2)
    assert ranks.lines(0) == ranks.lines(1) == ["sum 1.0 2.0 max 1"]
    ranks.started[0].kill()
    ranks.started[0].join()
    ranks.go()
    assert ranks.error(1) == (
        "rank 0 (host 10.0.0.0) did not reach all_reduce 3 where the others wait, and a connection was closed"
    )


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    ranks.start(0, 3, join_s=6.0)
    ranks.start(2, 3, join_s=6.0)
    for rank in (0, 2):
        assert ranks.error(rank) == "rank 1 did not join the rendezvous within 6 s"


def test_ranks_find_each_other_at_a_rendezvous_that_listens_on_its_address_alone(
    ranks: Ranks, rendezvous: Rendezvous
) -> None:
    assert rendezvous.where.startswith("127.0.0.1:")
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(rendezvous.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]
    ranks.go()
    for rank in range(2):
        ranks.start(rank, 2, where=f"{rendezvous.where}/127.0.0.1:4711")
    for rank in range(2):
        assert ranks.lines(rank, 2) == ["sum 1.0 2.0 max 1", "sum 1.0 2.0"]
        ranks.started[rank].join(PATIENCE_S)
        assert ranks.started[rank].exitcode == 0


def test_rendezvous_of_ranks(tmp_path: Path) -> None:
    assert rendezvous_of_ranks({}, tmp_path) == tmp_path / "rendezvous-0"
    assert rendezvous_of_ranks({"AREAL_ATTEMPT": "4f"}, tmp_path) == tmp_path / "rendezvous-4f"
    by_torchrun = {"AREAL_RENDEZVOUS": "10.0.0.1:700", "MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "4711"}
    assert rendezvous_of_ranks(by_torchrun | {"AREAL_ATTEMPT": "4f"}, tmp_path) == "10.0.0.1:700/10.0.0.3:4711"
