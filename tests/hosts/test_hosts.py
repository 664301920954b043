"""A run across machines, each a network namespace. Some are cut off and return, a rank dies or hangs, and the run ends
in order. The head node has control, storage and rank 0."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import load
from areal_core.run.launcher import read_summary
from areal_core.tracking.timeline import Span, read_timeline
from tests.support.hosts import (
    ADDRESSES,
    FILES_PORT,
    GENERATES,
    HEAD_NODE,
    JUDGES,
    REQUIRE_HOSTS,
    TRAINS,
    Cluster,
    Network,
)
from tests.support.namespaces import missing
from tests.support.needs import skip_without
from tests.support.runs import TINY

pytestmark = pytest.mark.hosts

OUTAGE_S = 600.0
LONG = {"training": {"steps": 60}}  # the last cut must come before the end; torchrun's agents need a second to notice
AWAY = {
    "training": {"ranks": 1, "hosts": 1, "steps": 1_000_000},
    "launch": {"head_trains": False},
    "stop": {"minutes": (OUTAGE_S + 90) / 60},
}
MISSED = f"rank 1 (host {ADDRESSES[TRAINS]}) did not reach "
LIST_STORE = """
import sys
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
storage = Storage.open(*sys.argv[1:])
newest = checkpoint.newest(storage)
print(newest and newest.step, *sorted(storage.sizes("final")))
"""


@pytest.fixture(scope="session", autouse=True)
def needed() -> None:
    skip_without(missing(), REQUIRE_HOSTS)


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def network(state: Path, needed: None) -> Iterator[Network]:
    with Network(state) as built:
        yield built


@pytest.fixture(scope="session")
def store(network: Network) -> str:
    """URL of an S3 server on the head node."""
    return network.serve_s3()


@pytest.fixture
def cluster(network: Network, store: str, state: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A run of seconds with remote workers on all other machines; its parameter are fields of its configuration."""
    groups: dict[str, dict[str, Any]] = {
        "storage": {"url": "s3://runs/areal", "endpoint_url": store},
        "rollout": {"request_timeout_s": 10.0, "max_tries": 100},  # a machine that is cut off costs many
        # Ranks that start again on a busy machine are seconds apart, and every vain wait costs a restart.
        "training": {"ranks": 2, "hosts": 2, "steps": 16, "collective_timeout_s": 10.0},
        "launch": {"remote_roles": "both", "address": ADDRESSES[HEAD_NODE], "files_port": FILES_PORT, "devices": 3},
    }
    own = getattr(request, "param", {})
    names = groups.keys() | own.keys()
    merged = {name: TINY.get(name, {}) | groups.get(name, {}) | own.get(name, {}) for name in names}
    config = load(TINY | {"state_dir": str(state)} | merged)
    with Cluster(network, config, request.function.__name__.removeprefix("test_")) as running:
        yield running
    for host in ADDRESSES:  # one that a failed test has left cut off
        network.join(host)


@pytest.mark.parametrize("cluster", [LONG], indirect=True)
def test_machines_that_are_cut_off_return(cluster: Cluster) -> None:
    ranks = [cluster.pid("trainer", rank) for rank in range(2)]
    assert ranks[0] in cluster.pids(HEAD_NODE)
    assert ranks[1] in cluster.pids(TRAINS)
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
    cluster.says(HEAD_NODE, "generation server generation-0 is removed")
    cluster.says(HEAD_NODE, "reward worker 1 disconnected")
    for host in (GENERATES, JUDGES):
        cluster.network.join(host)
    cluster.says(GENERATES, "the controller removed the generation server at ")
    cut_off = len(judged())
    cluster.until_step(cluster.step() + 2)
    cluster.network.cut(TRAINS)
    cluster.says(HEAD_NODE, MISSED)
    cluster.network.join(TRAINS)
    summary = cluster.finished()
    assert summary.tokens.consumed > 0
    assert len(judged()) > cut_off  # it has come back
    assert summary.model_url.startswith("s3://runs/areal/")
    step, *model = cluster.network.run(
        HEAD_NODE, LIST_STORE, cluster.run.info().checkpoint_url, cluster.config.storage.endpoint_url
    ).split()
    assert int(step) == summary.steps
    assert {"final/config.json", "final/model.safetensors", "final/tokenizer.json"} <= set(model)
    assert (cluster.copy(GENERATES).ready_info("generation") or {})["pid"] != server
    everywhere = read_timeline(cluster.run.timeline)
    for host in (GENERATES, TRAINS, JUDGES):
        here = read_timeline(cluster.copy(host).timeline)
        processes = {span.process for span in here}
        assert processes
        assert here == [span for span in everywhere if span.process in processes]
    assert "the controller removed the generation server at " in cluster.run.log_file("host-generation").read_text()
    assert not cluster.copy(TRAINS).payloads.exists()  # its parts of groups came past the controller
    assert not any(
        "requesting it from the controller" in log.read_text() for log in cluster.run.logs.glob("node-*.log*")
    )


@pytest.mark.parametrize("cluster", [AWAY], indirect=True)
@pytest.mark.nightly
def test_training_goes_on_while_the_store_is_away(cluster: Cluster) -> None:
    """The head node controls, another machine generates, and a third one has rank 0."""

    def saved() -> list[Span]:
        return [span for span in read_timeline(cluster.run.timeline) if span.kind == "checkpoint"]

    assert cluster.pid("trainer") in cluster.pids(TRAINS)
    cluster.wait_for("a checkpoint is saved", saved)
    for process in cluster.store:
        os.kill(process, signal.SIGSTOP)
    away = time.time()
    before = []
    while time.time() - away < OUTAGE_S:
        before.append(cluster.step())
        time.sleep(OUTAGE_S / 10)
        assert cluster.step() > before[-1]
    assert max(span.step for span in saved() if span.step is not None) < before[1]
    for process in cluster.store:
        os.kill(process, signal.SIGCONT)
    cluster.wait_for("checkpoints are saved again", lambda: any((span.step or 0) > before[-1] for span in saved()))
    cluster.ended()
    assert read_summary(cluster.run).reason == "minutes"
    assert "restart" not in cluster.said(HEAD_NODE) + cluster.said(TRAINS)
