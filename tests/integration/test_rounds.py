"""Rounds of torchrun's agents: one that ends leaves the rendezvous open, and what others write there is not read."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

PATIENCE_S = 120.0
# One of two agents; its one rank runs the given code.
AGENT = f"""
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from areal_core.training.distributed import node
node.register("token", int(sys.argv[5]))
settings = LaunchConfig(
    min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="r", rdzv_backend=node.BACKEND, rdzv_endpoint=sys.argv[1],
    rdzv_configs={{"is_host": False, "join_timeout": {PATIENCE_S:.0f}, "read_timeout": {PATIENCE_S:.0f},
                  "keep_alive_interval": 1, "keep_alive_max_attempt": int(sys.argv[4])}},
    max_restarts=int(sys.argv[2]), local_addr="127.0.0.1",
)
try:
    elastic_launch(settings, sys.executable)("-c", sys.argv[3])
except ChildFailedError:
    sys.exit("spent")
"""
WORKS = "import os, time; print('works', os.getpid(), flush=True); time.sleep(600)"
WORKING = re.compile(r"works (\d+)")
FAILS = "raise SystemExit(1)"


class Rendezvous:
    """The rendezvous process, and the agents that use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        self.agent_lives_s = 3  # without a heartbeat, of which there is one a second
        ready = folder / "rendezvous.json"
        options = ("--address", "127.0.0.1", "--ready-file", str(ready))
        self.process = subprocess.Popen([sys.executable, "-m", "areal_core.training.distributed.rendezvous", *options])
        self.wait_for(ready.exists)
        self.where = json.loads(ready.read_text())["url"].removeprefix("tcp://")

    def agent(self, rank: str, restarts: int = 0, *, node: int | None = None) -> Path:
        """Start one, of machine `node`, or of the next; returns the file of its output and of its rank's."""
        number = str(len(self.agents) if node is None else node)
        output = self._folder / f"agent-{len(self.agents)}.txt"
        with output.open("wb") as file:
            command = [sys.executable, "-c", AGENT, self.where, str(restarts), rank, str(self.agent_lives_s), number]
            self.agents.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
        return output

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, [file.read_text() for file in self._folder.glob("agent-*.txt")]
            time.sleep(0.05)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
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
    return bool(WORKING.search(output.read_text()))


@pytest.mark.slow
@pytest.mark.recovery
def test_an_agent_that_is_spent_leaves_the_round_open(rendezvous: Rendezvous) -> None:
    rendezvous.agent_lives_s = 15  # one that is thought dead comes back when its rank misses another: these never do
    stays, spent = rendezvous.agent(WORKS), rendezvous.agent(FAILS)
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


@pytest.mark.slow
@pytest.mark.nightly
def test_two_machines_of_one_number_make_no_round(rendezvous: Rendezvous) -> None:
    outputs = [rendezvous.agent(WORKS, node=0) for _ in range(2)]
    line = "--node: two machines say that they are number 0"
    rendezvous.wait_for(lambda: any(line in output.read_text() for output in outputs))
    assert not any(works(output) for output in outputs)
