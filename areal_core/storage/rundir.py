"""Paths in a run's folder, and small files through which its processes share settings and addresses.

<state_dir>/runs/<run_id>/
    config.json              the resolved configuration
    token                    secret in every request to a process of the run; only its user can read it
    run.json                 RunInfo: identity of the run, base model, location of its checkpoints
    ready/<role>-<index>.json  ready file of a process: its pid and, for a server, its URL
    heartbeat/<role>-<index>     heartbeat of a process; see areal_core.launch.heartbeat
    logs/<role>-<index>.log
    controller-port  files-port  ports of the controller and the data server, reused after a restart
    ledger.sqlite  outbox.sqlite
    payloads/                training data of scored groups; see areal_core.controller.payloads
    timeline/<role>-<index>.jsonl  activities of a process over time; see areal_core.tracking.timeline
    weights/v000007/         published versions
    evaluations/             records of scored versions, and a page for each
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
    """Facts about a run that `prepare` adds to its configuration."""

    run_id: str
    model_path: str  # folder of the base model, transformers format
    checkpoint_url: str  # store of this run's checkpoints and final model
    tracking_uri: str | None = None  # None: tracking is off
    tracking_experiment_id: str | None = None  # of MLflow, like the next field
    tracking_run_id: str | None = None
    flow_run_id: str | None = None
    number: int = 0  # fencing number of the launcher that runs the run; see areal_core.storage.lease
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
    launcher_lock = _Below("lock")  # held by the launcher of the run
    copy_file = _Below("copy.json")  # only on other machines than the head node (run.remote.copied)
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
    superseded = _Below("summary-superseded.json")  # summary of an earlier end of a resumed run

    @classmethod
    def of_command_line(cls) -> RunDir:
        """The folder named by --run-dir, for processes without other options."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--run-dir", type=Path, required=True)
        return cls(parser.parse_args().run_dir)

    @classmethod
    def create(cls, config: RunConfig, info: RunInfo, kind: str = "runs") -> RunDir:
        """Create or reuse the folder of a run, and write the files that its processes read.
        `kind` is the parent folder: "runs", or "evaluations", which have only generation servers."""
        run = cls(Path(config.state_dir).absolute() / kind / info.run_id)
        durable.make(run.root)
        if not run.token_file.exists():  # processes and machines of an earlier launcher may know it
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
        """The contents of copy.json, on other machines than the head node; None on the head node.

        `node` is the name of this machine's copy of the folder. `head` is the head node's URL, and `stager` that of
        this machine's stager, if any.
        """
        return json.loads(self.copy_file.read_text()) if self.copy_file.exists() else None

    def token(self) -> str:
        """The run's token; see areal_core.api.access."""
        return self.token_file.read_text().strip()

    def keep_token(self, token: str) -> None:
        """Write the run's token, unless the run has one.
        Call before `create` to reuse the token that other machines know from an earlier head node."""
        durable.make(self.root)
        scratch = self.root / f".token.{os.getpid()}"
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{token}\n")
        durable.sync(scratch)  # synced before the rename, so that no run has an empty token
        with contextlib.suppress(FileExistsError):  # another launcher was faster
            os.link(scratch, self.token_file)
        scratch.unlink()

    def numbered(self, number: int) -> RunInfo:
        """Record the fencing number of the launcher that runs the run from now on."""
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
        """File with the port of a listener that keeps its port across restarts."""
        return self.root / f"{role}-port"

    def ready_info(self, role: str, index: int = 0) -> dict[str, Any] | None:
        """The `pid` and `url` in a process's ready file; None while the process is not ready."""
        try:
            return json.loads(self.ready_file(role, index).read_text())
        except FileNotFoundError:
            return None

    def forget_ready(self) -> None:
        """Remove ready files and heartbeats of an earlier launcher's processes."""
        for file in (*self.ready.iterdir(), *self.heartbeats.glob("*")):
            file.unlink(missing_ok=True)

    def forget_ports(self) -> None:
        """Let the controller choose another port, as no process of the run knows the last one."""
        self.port_file("controller").unlink(missing_ok=True)

    def controller_url(self) -> str | None:
        """The controller's URL; None while the controller is not ready."""
        info = self.ready_info("controller")
        return None if info is None else str(info["url"])


def write_json(path: Path, value: Any, *, synced: bool = False) -> None:
    """Atomically write `value` as JSON: readers see the old file or the new one.
    With `synced` this also holds after a power loss."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    (durable.replace if synced else os.replace)(scratch, path)
