"""A run across machines, each a network namespace: control and storage on one, generation on one, ranks on two, rewards
on one. One is cut off and returns, a rank dies or hangs, and the run ends in order."""

from __future__ import annotations

import os
import re
import signal

import pytest

from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import read_timeline
from tests.support.hosts import ADDRESSES, GENERATES, HEAD_NODE, JUDGES, TRAINS, Cluster

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

FIRST, SECOND = TRAINS  # rank 0 and rank 1: torchrun orders machines by address
LIST_STORE = """
import sys
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
storage = Storage.open(*sys.argv[1:])
newest = checkpoint.newest(storage)
print(newest and newest.step, *sorted(storage.sizes("final")))
"""


def missed(host: str) -> str:
    rank = TRAINS.index(host)
    return f"rank {rank} (host {ADDRESSES[host]}) did not reach "


@pytest.mark.nightly
def test_a_run_across_machines_of_which_those_that_generate_and_judge_are_cut_off_and_return(cluster: Cluster) -> None:
    ranks = [cluster.pid("trainer", rank) for rank in range(2)]
    assert ranks[0] in cluster.pids(FIRST)
    assert ranks[1] in cluster.pids(SECOND)
    server = cluster.pid("generation")
    assert server in cluster.pids(GENERATES)
    cluster.start(JUDGES)
    assert cluster.pid("rewards", 1) in cluster.pids(JUDGES)

    def judged() -> list[float]:
        return [span.start_s for span in read_timeline(cluster.run.timeline) if span.process == "rewards-1"]

    cluster.until_step(2)
    cluster.wait_for("it judges", judged)
    for host in (GENERATES, JUDGES):
        cluster.network.cut(host)
    cluster.says(HEAD_NODE, "generation server generation-0 is taken out")
    cluster.says(HEAD_NODE, "reward worker 1 is gone")
    for host in (GENERATES, JUDGES):
        cluster.network.join(host)
    cluster.says(GENERATES, "was taken out by the controller: killed")
    cut_off = len(judged())
    summary = cluster.finished()
    assert cluster.pid("generation") != server
    assert summary.tokens.consumed > 0
    assert len(judged()) > cut_off  # it has come back
    assert summary.model_url.startswith("s3://runs/areal/")
    step, *model = cluster.network.run(
        HEAD_NODE, LIST_STORE, cluster.run.info().checkpoint_url, cluster.config.storage.endpoint_url
    ).split()
    assert int(step) == summary.steps
    assert {"final/config.json", "final/model.safetensors", "final/tokenizer.json"} <= set(model)


@pytest.mark.nightly
def test_each_training_machine_is_cut_off_and_returns(cluster: Cluster) -> None:
    for cut, left in ((SECOND, FIRST), (FIRST, SECOND)):
        cluster.until_step(cluster.step() + 2)
        cluster.network.cut(cut)
        cluster.says(left, missed(cut))
        cluster.network.join(cut)
    cluster.finished()


@pytest.mark.nightly
def test_a_rank_that_dies_and_one_that_hangs(cluster: Cluster) -> None:
    cluster.until_step(2)
    ranks = [cluster.pid("trainer", rank) for rank in range(2)]
    os.kill(ranks[1], signal.SIGKILL)
    cluster.says(SECOND, f"failed (exitcode: -9) local_rank: 0 (pid: {ranks[1]})")
    again = [cluster.pid("trainer", rank, but=ranks[rank]) for rank in range(2)]
    cluster.until_step(cluster.step() + 2)
    os.kill(again[1], signal.SIGSTOP)
    named = re.escape(missed(SECOND)) + r".* within 10 s \(training\.collective_timeout_s\)"
    cluster.wait_for("rank 0 names rank 1", lambda: re.search(named, cluster.output(FIRST)))
    cluster.says(SECOND, f"Sending process {again[1]} closing signal SIGTERM")
    os.kill(again[1], signal.SIGCONT)  # else torchrun kills it 30 s later
    cluster.finished()
    assert all(cluster.pid("trainer", rank) not in (ranks[rank], again[rank]) for rank in range(2))


@pytest.mark.parametrize("cluster", [60], indirect=True)  # steps: torchrun's agents need a second to notice
@pytest.mark.nightly
def test_the_rendezvous_dies_and_a_machines_command_is_killed(cluster: Cluster) -> None:
    cluster.until_step(2)
    ranks = [cluster.pid("trainer", rank) for rank in range(2)]
    os.kill(cluster.pid("rendezvous"), signal.SIGKILL)
    for host in TRAINS:
        cluster.says(host, "exited with code 1: restart 1 of 2")
    again = [cluster.pid("trainer", rank, but=ranks[rank]) for rank in range(2)]
    assert again[1] in cluster.pids(SECOND)
    cluster.processes[SECOND].kill()
    cluster.wait_for("nothing is left there", lambda: not cluster.pids(SECOND))
    cluster.start(SECOND)
    cluster.finished()


def test_machines_without_a_common_folder_are_cut_off_and_return(apart: Cluster) -> None:
    ranks = [apart.pid("trainer", rank) for rank in range(2)]
    assert ranks[0] in apart.pids(HEAD_NODE)
    assert ranks[1] in apart.pids(SECOND)
    server = apart.pid("generation")
    apart.until_step(2)
    apart.network.cut(GENERATES)
    apart.says(HEAD_NODE, "generation server generation-0 is taken out")
    apart.network.join(GENERATES)
    apart.says(GENERATES, "was taken out by the controller: killed")
    apart.until_step(apart.step() + 2)
    apart.network.cut(SECOND)
    apart.says(FIRST, f"rank 1 (host {ADDRESSES[SECOND]}) did not reach ")
    apart.network.join(SECOND)
    apart.finished()
    copies = {host: RunDir(apart.folder(host) / "runs" / apart.run.root.name) for host in (GENERATES, SECOND)}
    assert (copies[GENERATES].ready_info("generation") or {})["pid"] != server
    everywhere = read_timeline(apart.run.timeline)
    for copy in copies.values():
        here = read_timeline(copy.timeline)
        processes = {span.process for span in here}
        assert processes
        assert here == [span for span in everywhere if span.process in processes]
    assert "was taken out by the controller: killed" in apart.run.log_file("host-generation").read_text()
    assert not copies[SECOND].payloads.exists()  # its parts of groups came past the controller
    assert not any("the controller is asked for it" in log.read_text() for log in apart.run.logs.glob("node-*.log*"))
