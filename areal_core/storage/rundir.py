"""Paths in a run's folder, and the small files by which its processes exchange configuration and addresses.

<state_dir>/runs/<run_id>/
    config.json              the resolved configuration
    token                    what every request to a process of the run carries; its user alone can read it
    run.json                 RunInfo: who this run is, which model it starts from, where its checkpoints go
    ready/<role>-<index>.json  ready file of a process: its pid and, for a server, its URL
    heartbeat/<role>-<index>     what a process says of itself; see areal_core.launch.heartbeat
    logs/<role>-<index>.log
    controller-port  files-port  ports that the controller and the data server keep
    ledger.sqlite  outbox.sqlite
    payloads/                what groups have to be trained on; see areal_core.controller.payloads
    timeline/<role>-<index>.jsonl  what a process did when; see areal_core.tracking.timeline
    weights/v000007/         published versions
    evaluations/             records of versions that were scored, and a page for each
    summary.json             written once, by the controller, when the run has ended in order
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.config.schema import RunConfig, load_file
from areal_core.storage import durable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What `prepare` has settled about a run beside its configuration."""

    run_id: str
    model_path: str  # folder of the base model, transformers format
    checkpoint_url: str  # where this run's checkpoints and final model go
    tracking_uri: str | None = None  # None: tracking is off
    tracking_experiment_id: str | None = None  # of MLflow, as the next one
    tracking_run_id: str | None = None
    flow_run_id: str | None = None
    number: int = 0  # fencing number of the launcher that runs it; see areal_core.storage.lease
    prompts: dict[str, str] = field(default_factory=dict[str, str])  # digests of prompts, by the setting of their file


class _Below:
    """A path below the folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.root / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run's folder."""

    root: Path

    token_file = _Below("token")
    launcher_lock = _Below("lock")  # that a launcher holds while it runs the run
    copy_file = _Below("copy.json")  # on another machine than the head node (run.remote.copied)
    ready = _Below("ready")
    heartbeats = _Below("heartbeat")
    logs = _Below("logs")
    weights = _Below("weights")
    payloads = _Below("payloads")
    timeline = _Below("timeline")
    evaluations = _Below("evaluations")
    ledger = _Below("ledger.sqlite")
    outbox = _Below("outbox.sqlite")
    summary = _Below("summary.json")
    superseded = _Below("summary-superseded.json")  # an end that the run goes on after

    @classmethod
    def of_command_line(cls) -> RunDir:
        """The folder that the option --run-dir names, for processes that take no other."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--run-dir", type=Path, required=True)
        return cls(parser.parse_args().run_dir)

    @classmethod
    def create(cls, config: RunConfig, info: RunInfo, kind: str = "runs") -> RunDir:
        """Make the folder, or adopt that of an earlier start of this run, and write what the processes will read.
        `kind` is the folder that it lies in: runs, or evaluations, which have servers and no more."""
        run = cls(Path(config.state_dir).absolute() / kind / info.run_id)
        durable.make(run.root)
        if not run.token_file.exists():  # processes and machines of an earlier launcher may know one
            run.keep_token(secrets.token_urlsafe(32))
        run.copy_file.unlink(missing_ok=True)
        for folder in (run.ready, run.heartbeats, run.logs, run.weights, run.timeline):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(run.root / "config.json", config.to_dict(), synced=True)
        write_json(run.root / "run.json", dataclasses.asdict(info), synced=True)
        return run

    def config(self) -> RunConfig:
        return load_file(self.root / "config.json")

    def info(self) -> RunInfo:
        return RunInfo(**json.loads((self.root / "run.json").read_text()))

    def copy(self) -> dict[str, str] | None:
        """On another machine than the head node: the name of its copy of this folder (`node`), and the URLs of the
        `head` node and of the machine's `stager`, where it has one."""
        return json.loads(self.copy_file.read_text()) if self.copy_file.exists() else None

    def token(self) -> str:
        """See areal_core.api.access."""
        return self.token_file.read_text().strip()

    def keep_token(self, token: str) -> None:
        """Write the run's token, unless it has one. Before `create`: the one that other machines of the run know from
        an earlier head node."""
        durable.make(self.root)
        scratch = self.root / f".token.{os.getpid()}"
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{token}\n")
        durable.sync(scratch)  # before it has its name: no run has an empty token
        with contextlib.suppress(FileExistsError):  # another launcher was quicker
            os.link(scratch, self.token_file)
        scratch.unlink()

    def numbered(self, number: int) -> RunInfo:
        """Note the fencing number of the launcher that runs the run from now on."""
        info = dataclasses.replace(self.info(), number=number)
        write_json(self.root / "run.json", dataclasses.asdict(info), synced=True)
        return info

    def ready_file(self, role: str, index: int = 0) -> Path:
        return self.ready / f"{role}-{index}.json"

    def heartbeat_file(self, role: str, index: int = 0) -> Path:
        return self.heartbeats / f"{role}-{index}"

    def log_file(self, role: str, index: int = 0) -> Path:
        return self.logs / f"{role}-{index}.log"

    def timeline_file(self, role: str, index: int = 0) -> Path:
        return self.timeline / f"{role}-{index}.jsonl"

    def port_file(self, role: str) -> Path:
        """What holds the port of a listener that has the same one whenever it is started again."""
        return self.root / f"{role}-port"

    def ready_info(self, role: str, index: int = 0) -> dict[str, Any] | None:
        """The `pid` and `url` that a process has announced; None while it is not ready."""
        try:
            return json.loads(self.ready_file(role, index).read_text())
        except FileNotFoundError:
            return None

    def forget_ready(self) -> None:
        """Remove the ready files that processes of an earlier launcher have left, and their heartbeats."""
        for file in (*self.ready.iterdir(), *self.heartbeats.glob("*")):
            file.unlink(missing_ok=True)

    def forget_ports(self) -> None:
        """Let the controller choose another port: no process of the run, here or elsewhere, knows the last one."""
        self.port_file("controller").unlink(missing_ok=True)

    def controller_url(self) -> str | None:
        """Where the controller listens; None while it is not ready."""
        info = self.ready_info("controller")
        return None if info is None else str(info["url"])


def write_json(path: Path, value: Any, *, synced: bool = False) -> None:
    """Write `value` so that a reader sees the old file or the new one, never half of one; with `synced` also after a
    loss of power."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    (durable.replace if synced else os.replace)(scratch, path)
