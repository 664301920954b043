"""Ranks that sum, and the errors of the others when one hangs, dies or never comes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from areal_core.training.distributed.ranks import rendezvous_of_ranks
from tests.support import forked
from tests.support.processes import wait_for
from tests.support.ranks import summing

pytestmark = pytest.mark.slow  # they wait for one another in vain

PATIENCE_S = 120.0


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


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The rendezvous process; `where` gives its address."""
    module = "areal_core.training.distributed.rendezvous"
    options = ("--address", "127.0.0.1", "--ready-file", str(tmp_path / "ready.json"))
    process = subprocess.Popen([sys.executable, "-m", module, *options])
    yield process
    process.kill()
    process.wait()


def where(process: subprocess.Popen[bytes], folder: Path) -> str:
    wait_for((folder / "ready.json").exists)
    info = json.loads((folder / "ready.json").read_text())
    assert info["pid"] == process.pid
    assert info["url"].startswith("tcp://127.0.0.1:")
    return info["url"].removeprefix("tcp://") + "/127.0.0.1:4711"


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
    ranks: Ranks, rendezvous: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    place = where(rendezvous, tmp_path)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(rendezvous.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]
    ranks.go()
    for rank in range(2):
        ranks.start(rank, 2, where=place)
    for rank in range(2):
        assert ranks.lines(rank, 2) == ["sum 1.0 2.0 max 1", "sum 1.0 2.0"]
        ranks.started[rank].join(PATIENCE_S)
        assert ranks.started[rank].exitcode == 0


def test_rendezvous_of_ranks(tmp_path: Path) -> None:
    assert rendezvous_of_ranks({}, tmp_path) == tmp_path / "rendezvous-0"
    assert rendezvous_of_ranks({"AREAL_ATTEMPT": "4f"}, tmp_path) == tmp_path / "rendezvous-4f"
    by_torchrun = {"AREAL_RENDEZVOUS": "10.0.0.1:700", "MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "4711"}
    assert rendezvous_of_ranks(by_torchrun | {"AREAL_ATTEMPT": "4f"}, tmp_path) == "10.0.0.1:700/10.0.0.3:4711"
