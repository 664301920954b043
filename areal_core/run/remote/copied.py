"""A remote worker's copy of a run's folder.

    <folder>/runs/<run_id>/     like the run's own: holds the inputs of processes here, and their outputs, to be sent
        model/                  the base model
        weights/                versions that the stager has fetched, or rank 0 has made
        copy.json  copy.lock    this copy's name, the URLs of head node and stager; held by its worker and its processes

One thread reports the processes here to the head node once a second, and receives the ready files that they need.
Another thread sends their logs and timelines. The head node says whether the run has ended. If it is unreachable for
HEAD_TIMEOUT_S, the run counts as ended.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_core.api.head import Head, HeadNodeError, Session, fetch, parsed
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError, ProcessError, StorageError
from areal_core.launch import heartbeat
from areal_core.launch.supervisor import FileLock, StopSignal
from areal_core.models.verified import weights_digest
from areal_core.run.remote.files import IN_ORDER
from areal_core.run.remote.sending import Sender
from areal_core.run.remote.share import (
    FIRST_RANK,
    GENERATION,
    REPORT_TIMEOUT_S,
    REWARDS,
    TRAINER,
    Share,
    ShareContents,
    role_and_index,
    share_contents,
)
from areal_core.run.remote.stager import Stager
from areal_core.run.supervision import Supervision
from areal_core.storage import lease
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo, write_json

POLL_S = 1.0  # between two reports to the head node
HEAD_TIMEOUT_S = 60.0  # without a response of the head node, the run counts as ended
_SEND_S = 2.0  # between two transfers of logs and timelines
_FINAL_REPORT_S = 10.0  # time for the remaining log lines and the final report
_OWNER_S = 5.0  # beyond launch.stop_timeout_s: time for processes of an earlier command to end
_CLAIM_S = REPORT_TIMEOUT_S + 10.0  # time until the share of a lost worker is free
_LEAST_VERSIONS, _MOST_VERSIONS = 2, 8  # versions kept on this machine
_TEXT_CHARS = 200  # longest text in a heartbeat that the head node accepts
_RUN_ID = re.compile(r"[A-Za-z0-9][\w.-]{,159}", re.ASCII)
_FILE = re.compile(r"[\w+-][\w.+ -]*", re.ASCII)
_NEEDED = re.compile(r"(controller|rendezvous|trainer)-\d+", re.ASCII)


class RunLostError(ProcessError):
    """The run did not end in order, or its head node is unreachable; another head node may resume the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResources:
    """Resources of a remote worker while it owns its share."""

    run: RunDir
    locks: tuple[int, ...]  # inherited by the processes here; a command that replaces them waits for the locks
    stager: str | None = None  # URL of the stager of this machine; None if nothing here needs versions
    ended: Callable[[], bool]  # whether the run has ended in order; raises RunLostError


class RunCopy:
    """The copy of a run's folder in `folder`, made from the data of the head node's data server."""

    def __init__(self, head: Head, folder: Path) -> None:
        self._head = head
        self._folder = folder.absolute()
        self._about: dict[str, Any] = {}  # response to GET /run, once the run is found
        self._url = ""  # URL of the head node that responded

    @property
    def run(self) -> RunDir:
        """The copy of the run's folder, once the run is found."""
        return RunDir(self._folder / "runs" / self._about["run_id"])

    def find(self, patience_s: float, stop: StopSignal) -> RunConfig | None:
        """Wait for a run and return its configuration; None if it has ended in order or `stop` is set.
        Raises ConfigError if no run starts within `patience_s`."""
        deadline = time.monotonic() + patience_s
        with closing(self._head.session()) as session:
            while not stop.is_set():
                try:
                    self._about, self._url = _about(session), session.url
                    if self._about["ended"] == IN_ORDER:
                        return None
                    if self._about["ended"] is None:
                        return load(self._about["config"] | {"state_dir": str(self._folder)})
                    lack = f"run {self.run.root.name} has just ended"
                except HeadNodeError as error:
                    lack = str(error)
                if time.monotonic() >= deadline:
                    raise ConfigError(f"--head: no run was started within {patience_s:g} s (--wait): {lack}")
                stop.wait(min(POLL_S, patience_s))
        return None

    @contextmanager
    def own_share(
        self, share: Share, config: RunConfig, address: str, *, supervision: Supervision, stop: StopSignal
    ) -> Iterator[ShareResources]:
        """Own the share within the `with`, and keep the copy up to date; yields the resources of the share.

        `address` is this machine's. Waits for the processes of an earlier command to end. Raises ProcessError if
        another worker owns the share, and the errors of making the copy.
        """
        run = self.run
        try:
            run.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--folder: can't create {run.root}: {error.strerror}") from None
        busy = f"--folder: another command uses {run.root}; give every command its own folder"
        with ExitStack() as held:
            lock = FileLock(run.root / "copy.lock", timeout_s=config.launch.stop_timeout_s + _OWNER_S, busy=busy)
            held.enter_context(lock)
            self._write(run, config)
            if share.role == TRAINER:
                _check_store(run, config)
            sync = held.enter_context(_HeadSync(self._head, run, config, share, address).running(supervision, stop))
            self._fetch_model(run, stop, weights=share.role != REWARDS)
            stager = None
            if share.role == GENERATION or FIRST_RANK in share_contents(config, share).processes:
                kept = min(_MOST_VERSIONS, config.max_staleness + _LEAST_VERSIONS)
                stager = held.enter_context(Stager(run, self._head, address, kept=kept).running(supervision))
                _record_urls(run, stager=stager)
            yield ShareResources(run=run, locks=(lock.fd,), stager=stager, ended=sync.ended)

    def _write(self, run: RunDir, config: RunConfig) -> None:
        for folder in (run.ready, run.heartbeats, run.logs, run.weights, run.timeline, _model(run)):
            folder.mkdir(exist_ok=True)
        run.forget_ready()
        run.token_file.unlink(missing_ok=True)
        run.keep_token(self._head.token)
        _record_urls(run, head=self._url)
        write_json(run.root / "config.json", config.to_dict())
        info = RunInfo(**{**self._about["info"], "model_path": str(_model(run))})
        write_json(run.root / "run.json", dataclasses.asdict(info))

    def _fetch_model(self, run: RunDir, stop: StopSignal, *, weights: bool) -> None:
        """Fetch missing and changed files of the model. Raises RunLostError, also once `stop` is set."""
        folder, wanted = _model(run), self._about["model"]
        if not weights:
            wanted = {name: file for name, file in wanted.items() if not name.endswith(".safetensors")}
        for stale in folder.iterdir():
            if stale.name not in wanted:
                stale.unlink()
        for name, file in wanted.items():
            path = folder / name
            if path.exists() and path.stat().st_size == file["size"] and weights_digest(path) == file["digest"]:
                continue
            scratch = folder / ".arriving"
            url = f"/model/{urllib.parse.quote(name)}"
            try:
                fetch(self._head, url, scratch, file["digest"], stopped=stop.is_set, patience_s=HEAD_TIMEOUT_S)
            except HeadNodeError as error:
                raise RunLostError(str(error)) from None
            scratch.replace(path)


class _HeadSync:
    """Keeps head node and copy informed of each other's processes."""

    def __init__(self, head: Head, run: RunDir, config: RunConfig, share: Share, address: str) -> None:
        self._head = head
        self._run = run
        self._share = share
        self._address = address
        self._contents: ShareContents = share_contents(config, share)
        self._node = (run.copy() or {})["node"]
        self._over = threading.Event()
        self._silent_s = 0.0  # since the head node's last response, counting only time in which it was asked
        self._ended: str | None = None

    @contextmanager
    def running(self, supervision: Supervision, stop: StopSignal) -> Iterator[_HeadSync]:
        """Claim the share, and follow the head node until the end of the `with`.
        Raises ProcessError if another worker owns the share."""
        with closing(self._head.session()) as session, closing(self._head.session()) as channel:
            files = [f"{folder}/{name}" for folder, name in sorted(self._contents.files)]
            sender = Sender(self._run.root, files, partial(self._append, channel), self._run.root / "sent.json")
            self._claim(session, stop)
            threads: list[threading.Thread] = []
            with ExitStack() as ending:
                ending.callback(self._send_final_report, sender, session, threads)
                for name, work in (("follow", lambda: self._follow(session)), ("send", lambda: self._send(sender))):
                    thread = supervision.thread(name, work, patience_s=self._head.timeout_s + POLL_S)
                    threads.append(ending.enter_context(thread))
                ending.callback(self._over.set)
                yield self

    def ended(self) -> bool:
        """Whether the run has ended in order. Raises RunLostError if it ended otherwise, or is unreachable."""
        if self._ended not in (None, IN_ORDER):
            raise RunLostError(f"run {self._run.root.name} has ended without a summary")
        if self._silent_s > HEAD_TIMEOUT_S:
            raise RunLostError(
                f"the head node has not responded for {HEAD_TIMEOUT_S:g} s: run {self._run.root.name} has ended, or is "
                "unreachable"
            )
        return self._ended is not None

    def _claim(self, session: Session, stop: StopSignal) -> None:
        deadline = time.monotonic() + _CLAIM_S
        while True:
            try:
                if (taken := self._report(session)) is None:
                    return
                lack = ProcessError(taken)
            except HeadNodeError as error:
                lack = RunLostError(str(error))
            if time.monotonic() > deadline or stop.wait(POLL_S):
                raise lack

    def _follow(self, session: Session) -> None:
        since = time.monotonic()
        while not self._over.wait(POLL_S):
            try:
                if (taken := self._report(session)) is not None:
                    raise ProcessError(taken)
                self._silent_s = 0.0
            except HeadNodeError:
                # Do not count time in which this machine itself was suspended.
                self._silent_s += min(time.monotonic() - since, self._head.timeout_s + 2 * POLL_S)
            since = time.monotonic()

    def _report(self, session: Session, *, over: bool = False) -> str | None:
        """Report to the head node and apply its response; returns an error if another worker owns the share.
        Raises HeadNodeError, and ProcessError or RunLostError for an unexpected response."""
        report = {
            "role": self._share.role,
            "first": self._share.first,
            "count": len(self._share.indices),
            "address": self._address,
            "over": over,
            **self._process_reports(),
        }
        status, content = session.request("POST", f"/nodes/{self._node}", json.dumps(report).encode())
        if status == 409:
            return content.decode(errors="replace")
        if status != 200:
            raise ProcessError(
                f"the head node at {self._head.url} returned {status}: {content.decode(errors='replace')}"
            )
        response = parsed(content)
        if response["run_id"] != self._run.root.name:
            raise RunLostError(f"the head node now runs {response['run_id']}: run {self._run.root.name} has ended")
        if response["number"] != self._run.info().number:  # another launcher has resumed the run
            self._run.numbered(response["number"])
        self._write_ready_files(response["ready"])
        _record_urls(self._run, head=session.url)
        self._ended = response["ended"]
        return None

    def _process_reports(self) -> dict[str, Any]:
        """Ready files and heartbeats of the processes here."""
        ready, heartbeats = dict[str, Any](), dict[str, Any]()
        for name in self._contents.processes:
            if (info := self._run.ready_info(*role_and_index(name))) is not None:
                ready[name] = info
            if (beat := heartbeat.read(self._run.heartbeats / name)) is not None:
                values = dataclasses.asdict(beat)
                heartbeats[name] = {k: v[:_TEXT_CHARS] if isinstance(v, str) else v for k, v in values.items()}
        return {"ready": ready, "heartbeats": heartbeats}

    def _write_ready_files(self, ready: dict[str, Any]) -> None:
        """Write the ready files of processes on other machines, as the head node reports them."""
        there = {name: info for name, info in ready.items() if _NEEDED.fullmatch(name)}
        for name, info in there.items():
            if name not in self._contents.processes and self._run.ready_info(*role_and_index(name)) != info:
                write_json(self._run.ready / f"{name}.json", info)
        for file in self._run.ready.glob("*.json"):
            if _NEEDED.fullmatch(file.stem) and file.stem not in there and file.stem not in self._contents.processes:
                file.unlink(missing_ok=True)

    def _append(self, channel: Session, name: str, offset: int, data: bytes) -> tuple[bool, int]:
        status, content = channel.request("POST", f"/nodes/{self._node}/{name}?offset={offset}", data)
        if status not in (200, 409):
            raise HeadNodeError(f"{name}: {status}: {content.decode(errors='replace')}")
        return status == 200, parsed(content)["size"]

    def _send(self, sender: Sender) -> None:
        while not self._over.wait(_SEND_S):
            sender.send_new()

    def _send_final_report(self, sender: Sender, session: Session, threads: Sequence[threading.Thread]) -> None:
        """Send the remaining log lines and the final report; skipped while a thread still uses the sessions.
        If the head node is unreachable, it notices the end of this worker by itself."""
        if any(thread.is_alive() for thread in threads):
            return
        deadline = time.monotonic() + _FINAL_REPORT_S
        with suppress(HeadNodeError, ProcessError, ConfigError):
            while not self._send_rest(sender, session) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            self._report(session, over=True)

    def _send_rest(self, sender: Sender, session: Session) -> bool:
        """Report, then send the remaining log lines; returns whether the head node has received all of them.
        The report comes first, because a restarted data server accepts no data before it knows the share."""
        try:
            self._report(session)
        except HeadNodeError:
            return False
        return sender.send_new(last=True)


def _about(session: Session) -> dict[str, Any]:
    """The head node's description of its run. Raises HeadNodeError, ConfigError."""
    status, content = session.request("GET", "/run")
    about = parsed(content) if status == 200 else None
    if not (isinstance(about, dict) and about.keys() >= {"run_id", "ended", "config", "info", "model"}):
        said = f"GET /run of {session.url} returned status {status} and no description of a run"
        raise ConfigError(f"--head: must be the URL of a run's data server, but {said}")
    names = [str(about["run_id"]), *about["model"]]
    if not _RUN_ID.fullmatch(names[0]) or not all(map(_FILE.fullmatch, names[1:])):
        raise ConfigError(f"--head: a run or a file of its model has an invalid name: {names!r:.200}")
    return about


def _check_store(run: RunDir, config: RunConfig) -> None:
    """Check that this machine reaches the run's store, which holds the lease and the checkpoints.
    Raises ConfigError, StorageError."""
    url = run.info().checkpoint_url
    storage = Storage.open(url, config.storage.endpoint_url)
    if lease.CasObject(storage, lease.NAME).read()[0] is None:
        wanted = "a store that this machine shares with the head node, such as s3://bucket/prefix"
        raise StorageError(f"storage.url: must be {wanted}, got {url}, which holds no lease of the run here")


def _model(run: RunDir) -> Path:
    return run.root / "model"


def _record_urls(run: RunDir, **urls: str) -> None:
    """Record the URLs of head node and stager, and the name of this copy, which is chosen once."""
    known = run.copy() or {"node": secrets.token_hex(8)}
    if known != (noted := known | urls):
        write_json(run.copy_file, noted)
