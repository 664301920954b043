"""Machines of an emulated network: namespaces with an address each, joined to a bridge in one more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from areal_core.config.schema import RunConfig
from areal_core.run.launcher import run_folder
from areal_core.storage.rundir import RunDir
from areal_core.types import RunSummary
from tests.support import namespaces
from tests.support.namespaces import TIMEOUT_S, Switch
from tests.support.runs import Watched, checked_summary

T = TypeVar("T")

HEAD_NODE, GENERATES, TRAINS, JUDGES = "head", "generates", "trains", "judges"  # the head node trains, too
ADDRESSES = {host: f"10.77.0.{number}" for number, host in enumerate((HEAD_NODE, GENERATES, TRAINS, JUDGES), 1)}
FILES_PORT = 8900
REQUIRE_HOSTS = "AREAL_REQUIRE_HOSTS"  # set: a machine that lacks something fails these tests instead of skipping them
_SWITCH = "switch"
_MOTO_PORT = 5000
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class Network:
    """One machine a name of ADDRESSES. A context: at its end nothing is left of it, or of what runs there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = f"{namespaces.PREFIX}-{os.getpid()}"

    def __enter__(self) -> Network:
        namespaces.sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (*ADDRESSES, _SWITCH):
            self.kill(host)
            namespaces.delete(self._namespace(host))

    def start(self, host: str, output: Path, *command: object) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(host), sys.executable, *map(str, command)],
                env={**os.environ, **_CREDENTIALS},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, host: str, code: str, *arguments: object) -> str:
        """The output of a few lines of Python that run there."""
        command = ["ip", "netns", "exec", self._namespace(host), sys.executable, "-c", code, *map(str, arguments)]
        environment = {**os.environ, **_CREDENTIALS}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pids(self, host: str) -> list[int]:
        """Everything that runs there."""
        return namespaces.pids(self._namespace(host))

    def kill(self, host: str, *, but: Sequence[int] = ()) -> None:
        namespaces.kill_all(self._namespace(host), but)

    def cut(self, host: str) -> None:
        """Nothing reaches this machine or comes from it any more."""
        self._switch.cut(host)

    def join(self, host: str) -> None:
        self._switch.join(host)

    def serve_s3(self) -> str:
        """A store on the head node; returns its URL for clients on all machines."""
        url = f"http://{ADDRESSES[HEAD_NODE]}:{_MOTO_PORT}"
        moto = ("-m", "moto.server", "-H", ADDRESSES[HEAD_NODE], "-p", _MOTO_PORT)
        self.start(HEAD_NODE, self._folder / "moto.txt", *moto)
        wait = f"""
import time, urllib.request
deadline = time.monotonic() + {TIMEOUT_S}
while True:
    try:
        urllib.request.urlopen("{url}/moto-api/", timeout=5)
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.1)
"""
        self.run(HEAD_NODE, wait)
        return url

    def _build(self) -> None:
        self._switch = Switch(self._namespace(_SWITCH))
        for host, address in ADDRESSES.items():
            self._switch.plug_in(self._namespace(host), host, address, 24)

    def _namespace(self, host: str) -> str:
        return f"{self._own}-{host}"


class Cluster(Watched):
    """One run across the machines of a network. A context: whatever is left at its end is killed."""

    def __init__(self, network: Network, config: RunConfig, run_id: str) -> None:
        self.network, self.config = network, config
        self.run = run_folder(config, run_id)
        self._texts = Path(config.state_dir) / f"{run_id}-outputs"
        self._texts.mkdir(parents=True)
        self._others = {host: tuple(network.pids(host)) for host in ADDRESSES}
        self.store = self._others[HEAD_NODE]  # the processes that serve it
        file = self._texts / "config.json"
        file.write_text(json.dumps(config.to_dict()))
        self.processes = {
            HEAD_NODE: network.start(
                HEAD_NODE, self._text(HEAD_NODE), "-m", "areal_core", "--run-id", run_id, "--config", file
            )
        }
        self.launcher = self.processes[HEAD_NODE]
        self.start(GENERATES)
        self.start(TRAINS)

    def start(self, host: str) -> None:
        """Start the remote worker of a machine. The run needs all of them but JUDGES, which is not started with it."""
        roles = {
            GENERATES: ("generation",),
            TRAINS: ("trainer", "--node", int(self.config.launch.head_trains)),
            JUDGES: ("rewards", "--workers", 1),
        }
        self.wait_for("the run's token is made", self.run.token_file.exists)
        where = ("--head", f"http://{ADDRESSES[HEAD_NODE]}:{FILES_PORT}", "--token-file", self.run.token_file)
        self.processes[host] = self.network.start(
            host,
            self._text(host),
            *("-m", "areal_core.run.remote_worker", *roles[host], *where),
            *("--folder", self._texts / host, "--address", ADDRESSES[host]),
        )

    def copy(self, host: str) -> RunDir:
        """A machine's copy of the run's folder."""
        return RunDir(self._texts / host / "runs" / self.run.root.name)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for host in ADDRESSES:
            self.network.kill(host, but=self._others[host])
        for process in self.processes.values():
            process.wait()

    def said(self, host: str) -> str:
        return self._text(host).read_text()

    def output(self) -> str:
        return "\n".join(f"-- {host}\n{self.said(host)[-4000:]}" for host in self.processes)

    def says(self, host: str, text: str) -> None:
        """Wait for a text in the output of a machine's command."""
        self.wait_for(f"{host} says {text!r}", lambda: text in self.said(host))

    def pids(self, host: str) -> list[int]:
        """The processes of this run there."""
        return [pid for pid in self.network.pids(host) if pid not in self._others[host]]

    def finished(self) -> RunSummary:
        """The summary, after a look at everything that has to hold on all machines when a run has ended in order."""
        self.ended()
        return checked_summary(self.run, self.config)

    def ended(self) -> None:
        """Wait for the end of the run, in order on all machines, with nothing left there."""
        for host, process in self.processes.items():
            try:
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{host} hangs\n{self.output()}") from None
            assert status == 0, f"{host} ended with {status}\n{self.output()}"
        assert not {host: left for host in ADDRESSES if (left := self.pids(host))}, self.output()

    def _text(self, host: str) -> Path:
        return self._texts / f"{host}.txt"
