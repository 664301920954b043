"""A run across machines, each a network namespace on a bridge. Some are cut off and return, a rank dies or hangs, and
the run ends in order. The head node has control, storage and rank 0."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from areal_core.config.schema import load
from areal_core.run.launcher import run_folder
from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import read_timeline
from areal_core.types import RunSummary
from flows.stack import responds
from tests.support import namespaces
from tests.support.namespaces import TIMEOUT_S, Switch, missing
from tests.support.needs import skip_without
from tests.support.processes import wait_for
from tests.support.runs import TINY, Watched, checked_summary, merged

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

REQUIRE_HOSTS = "AREAL_REQUIRE_HOSTS"  # set: a machine that lacks something fails these tests instead of skipping them
HEAD_NODE, GENERATES, TRAINS, JUDGES = "head", "generates", "trains", "judges"  # the head node trains, too
ADDRESSES = {host: f"10.77.0.{number}" for number, host in enumerate((HEAD_NODE, GENERATES, TRAINS, JUDGES), 1)}
FILES_PORT, STORE_PORT = 8900, 5000
STORE = f"http://{ADDRESSES[HEAD_NODE]}:{STORE_PORT}"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
MISSED = f"rank 1 (host {ADDRESSES[TRAINS]}) did not reach "
GROUPS: dict[str, dict[str, Any]] = {
    "storage": {"url": "s3://runs/areal", "endpoint_url": STORE},
    "rollout": {"request_timeout_s": 10.0, "max_tries": 100},  # a machine that is cut off costs many
    # Ranks that start again on a busy machine are seconds apart, and every vain wait costs a restart. The last cut must
    # come before the end; torchrun's agents need a second to notice.
    "training": {"ranks": 2, "hosts": 2, "steps": 60, "collective_timeout_s": 10.0},
    "launch": {"remote_roles": "both", "address": ADDRESSES[HEAD_NODE], "files_port": FILES_PORT, "devices": 3},
}
ROLES: dict[str, tuple[object, ...]] = {
    GENERATES: ("generation",),
    TRAINS: ("trainer", "--node", 1),
    JUDGES: ("rewards", "--workers", 1),
}


class Cluster(Watched):
    """One run, its store, and the machines that it is on. A context: at its end nothing is left of them."""

    def __init__(self, state: Path) -> None:
        self._own = f"{namespaces.PREFIX}-{os.getpid()}"
        self._folder = state
        self.config = load(merged(TINY, GROUPS) | {"state_dir": str(state)})
        self.run = run_folder(self.config, "r")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        namespaces.sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        namespaces.end(self._own)
        for process in self.processes.values():
            process.wait()

    def _build(self) -> None:
        self.switch = Switch(f"{self._own}-switch")
        for host, address in ADDRESSES.items():
            self.switch.plug_in(self._namespace(host), host, address, 24)
        self._run(HEAD_NODE, "moto.server", "-H", ADDRESSES[HEAD_NODE], "-p", STORE_PORT)
        with namespaces.entered(self._namespace(HEAD_NODE)):
            wait_for(lambda: responds(f"{STORE}/moto-api/"), "the store")
        self._store = self.pids(HEAD_NODE)
        file = self._folder / "config.json"
        file.write_text(json.dumps(self.config.to_dict()))
        self.launcher = self._run(HEAD_NODE, "areal_core", "--run-id", "r", "--config", file)
        self.processes[HEAD_NODE] = self.launcher
        self.start(GENERATES)
        self.start(TRAINS)

    def start(self, host: str) -> None:
        """Start the remote worker of a machine. The run needs all of them but JUDGES, which is not started with it."""
        self.wait_for("the run's token is made", self.run.token_file.exists)
        where = ("--head", f"http://{ADDRESSES[HEAD_NODE]}:{FILES_PORT}", "--token-file", self.run.token_file)
        own = ("--folder", self._folder / host, "--address", ADDRESSES[host])
        self.processes[host] = self._run(host, "areal_core.run.remote_worker", *ROLES[host], *where, *own)

    def _run(self, host: str, *command: object) -> subprocess.Popen[bytes]:
        with self._text(host).open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(host), sys.executable, "-m", *map(str, command)],
                env={**os.environ, **CREDENTIALS},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def copy(self, host: str) -> RunDir:
        """A machine's copy of the run's folder."""
        return RunDir(self._folder / host / "runs" / self.run.root.name)

    def output(self) -> str:
        return "\n".join(f"-- {host}\n{self._text(host).read_text()[-4000:]}" for host in self.processes)

    def says(self, host: str, text: str) -> None:
        """Wait for a text in the output of a machine's command."""
        self.wait_for(f"{host} says {text!r}", lambda: text in self._text(host).read_text())

    def pids(self, host: str) -> list[int]:
        """Everything that runs there."""
        return namespaces.pids(self._namespace(host))

    def stored(self) -> list[str]:
        """The names of all objects, from the head node."""
        with namespaces.entered(self._namespace(HEAD_NODE)):
            keys = {name.lower(): value for name, value in CREDENTIALS.items()}
            client = boto3.client("s3", endpoint_url=STORE, region_name=keys.pop("aws_default_region"), **keys)
            return [one["Key"] for one in client.list_objects_v2(Bucket="runs")["Contents"]]

    def finished(self) -> RunSummary:
        """The summary, after a look at everything that has to hold on all machines when a run has ended in order."""
        for host, process in self.processes.items():
            try:
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{host} hangs\n{self.output()}") from None
            assert status == 0, f"{host} ended with {status}\n{self.output()}"
        assert [pid for host in ADDRESSES for pid in self.pids(host)] == self._store, self.output()
        return checked_summary(self.run, self.config)

    def _namespace(self, host: str) -> str:
        return f"{self._own}-{host}"

    def _text(self, host: str) -> Path:
        return self._folder / f"{host}.txt"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    skip_without(missing(), REQUIRE_HOSTS)
    with Cluster(tmp_path) as running:
        yield running


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
        cluster.switch.cut(host)
    cluster.says(HEAD_NODE, "generation server generation-0 is taken out")
    cluster.says(HEAD_NODE, "reward worker 1 is gone")
    for host in (GENERATES, JUDGES):
        cluster.switch.join(host)
    cluster.says(GENERATES, "was taken out by the controller: killed")
    cut_off = len(judged())
    cluster.until_step(cluster.step() + 2)
    cluster.switch.cut(TRAINS)
    cluster.says(HEAD_NODE, MISSED)
    cluster.switch.join(TRAINS)
    summary = cluster.finished()
    assert summary.tokens.consumed > 0
    assert len(judged()) > cut_off  # it has come back
    assert summary.model_url.startswith("s3://runs/areal/")
    names = "\n".join(cluster.stored())
    assert re.search(rf"r/checkpoints/step-{summary.steps:06d}\.\d+/manifest\.json", names)
    assert all(f"r/final/{name}" in names for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert (cluster.copy(GENERATES).ready_info("generation") or {})["pid"] != server
    everywhere = read_timeline(cluster.run.timeline)
    for host in (GENERATES, TRAINS, JUDGES):
        here = read_timeline(cluster.copy(host).timeline)
        processes = {span.process for span in here}
        assert processes
        assert here == [span for span in everywhere if span.process in processes]
    assert "was taken out by the controller: killed" in cluster.run.log_file("host-generation").read_text()
    assert not cluster.copy(TRAINS).payloads.exists()  # its parts of groups came past the controller
    assert not any("the controller is asked for it" in log.read_text() for log in cluster.run.logs.glob("node-*.log*"))
