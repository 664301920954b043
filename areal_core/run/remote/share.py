"""Shares of a run: the processes of each remote worker, and the last report of every worker.

A share belongs to one worker at a time. The worker reports once a second. `REPORT_TIMEOUT_S` after its last report
another worker may take the share. The head node writes the reported ready files and heartbeats into the run's folder.
So ranks find each other, and the launcher sees whether processes on other machines are busy.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from areal_core.config.engines import known_generation
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, ConfigError
from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import Count, Heartbeat, Text
from areal_core.storage.rundir import RunDir, write_json

GENERATION, TRAINER, REWARDS = "generation", "trainer", "rewards"
_MOST_WORKERS = 4096
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
REPORT_TIMEOUT_S = 15.0  # without a report, after which another worker may take a share
FIRST_RANK = "trainer-0"
LOGS, TIMELINE = "logs", "timeline"  # folders of a run to which processes of a share append


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of a run: some generation servers, the ranks of one machine, or some reward workers."""

    role: str  # GENERATION, TRAINER or REWARDS
    first: int = 0  # number of the first server, machine or reward worker (of other machines)
    count: int | None = None  # servers or workers; None: all servers of the run, one machine, or one worker

    @property
    def indices(self) -> range:
        """Numbers of the servers, the workers or the machine of a settled share."""
        assert self.count is not None
        return range(self.first, self.first + self.count)

    @property
    def journal(self) -> str:
        """The role name under which the remote worker logs."""
        return f"host-{self.role}"

    def overlaps(self, other: Share) -> bool:
        return self.role == other.role and bool(set(self.indices).intersection(other.indices))

    def with_count(self, config: RunConfig) -> Share:
        """This share with its count filled in. Raises ConfigError for a share that the run does not have."""
        count = self.count or 1
        if self.role == REWARDS:  # any run accepts reward workers of other machines
            if self.first + count > _MOST_WORKERS:
                raise ConfigError(
                    f"--first, --workers: must add up to at most {_MOST_WORKERS}, got {self.first + count}"
                )
        elif self.role not in config.remote_roles:
            runs, roles = "the trainer" if self.role == TRAINER else "servers", config.launch.remote_roles
            wanted = f"{self.role} or both so that another machine may run {runs}"
            raise ConfigError(f"launch.remote_roles: must be {wanted}, got {roles!r}; start the run with it")
        elif self.role == TRAINER:
            count, least = 1, int(config.launch.head_trains)
            if not least <= self.first < config.training.hosts:
                hosts, why = config.training.hosts, "; node 0 is the head node" if least else ""
                wanted = f"from {least} to {hosts - 1} (training.hosts={hosts}{why})"
                raise ConfigError(f"--node: must be {wanted}, got {self.first}")
        elif self.first + (count := self.count or config.generation_servers) > config.generation_servers:
            raise ConfigError(
                f"--first: servers {self.first} to {self.first + count - 1} are more than the run has, "
                f"{config.generation_servers} (generation.servers); set --servers to the number of servers here"
            )
        return replace(self, count=count)


@dataclass(frozen=True, slots=True)
class ShareContents:
    """Processes and files that belong to one share."""

    processes: frozenset[str]  # with ready file and heartbeat: generation-0, trainer-1
    files: frozenset[tuple[str, str]]  # (folder, name) of files they append to


def role_and_index(process: str) -> tuple[str, int]:
    """Split a process name such as "trainer-1" into role and index."""
    role, _, index = process.rpartition("-")
    return role, int(index)


def places(config: RunConfig, share: Share) -> range:
    """Numbers of a share's reward workers in the run; the controller's machine has the first ones."""
    first = config.rollout.reward_workers + share.first
    return range(first, first + len(share.indices))


def share_contents(config: RunConfig, share: Share) -> ShareContents:
    """Processes and files of a settled share."""
    if share.role == GENERATION:
        processes = [f"generation-{index}" for index in share.indices]
        vllm = known_generation(config.generation.engine).own_server  # the controller writes vLLM's timelines
        logs = [*processes, *(f"vllm-{index}" for index in share.indices if vllm)]
        timelines = [] if vllm else processes
    elif share.role == REWARDS:
        timelines = [f"rewards-{place}" for place in places(config, share)]
        processes = logs = timelines[:1]
    else:
        ranks = range(share.first * config.ranks_per_host, (share.first + 1) * config.ranks_per_host)
        processes = [f"trainer-{rank}" for rank in ranks]
        logs, timelines = [f"node-{share.first}"], processes
        if FIRST_RANK in processes:
            timelines = [*processes, "publisher-0"]
    logs = [*logs, f"{share.journal}-{share.first}"]
    return ShareContents(
        processes=frozenset(processes),
        files=frozenset([(LOGS, f"{name}.log") for name in logs] + [(TIMELINE, f"{name}.jsonl") for name in timelines]),
    )


class ReadyInfo(msgspec.Struct):
    """The contents of a ready file."""

    pid: Count
    url: Text | None = None


class NodeReport(msgspec.Struct):
    """A remote worker's report, sent once a second."""

    role: str
    first: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    address: Text
    over: bool = False  # this is the final report
    ready: dict[str, ReadyInfo] = {}  # by process name
    heartbeats: dict[str, Heartbeat] = {}


class TakenError(ArealError):
    """Another worker owns the share."""


@dataclass(slots=True)
class _Node:
    share: Share
    contents: ShareContents
    address: str
    reported_at: float  # in seconds of the clock
    over: bool = False


class Nodes:
    """All remote workers, by the unique names that they choose for themselves."""

    def __init__(self, run: RunDir, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._config = config
        self._clock = clock
        self._nodes: dict[str, _Node] = {}

    def handle_report(self, name: str, report: NodeReport) -> None:
        """Process a worker's report. Raises ValueError for an invalid report, TakenError."""
        if not _NAME.fullmatch(name):
            raise ValueError("node: must be letters, digits, dashes and underscores, at most 64")
        share = Share(role=report.role, first=report.first, count=report.count).with_count(self._config)
        own = share_contents(self._config, share)
        if strange := (report.ready.keys() | report.heartbeats.keys()) - own.processes:
            raise ValueError(f"ready, heartbeats: {min(strange)[:64]!r} is none of {', '.join(sorted(own.processes))}")
        others = {one: node for one, node in self._nodes.items() if one != name and node.share.overlaps(share)}
        for node in others.values():
            if self._is_alive(node):
                taken = next(index for index in share.indices if index in node.share.indices)
                raise TakenError(
                    f"--head: {share.role} {taken} of run {self._run.root.name} already runs under another command, "
                    f"at {node.address}"
                )
        for gone in others:
            del self._nodes[gone]
        self._nodes[name] = _Node(share, own, report.address, self._clock(), report.over)
        self._write(own, report)

    def contents_of(self, name: str) -> ShareContents | None:
        """Processes and files of a worker; None if it has no share, or has lost it."""
        return self._nodes[name].contents if name in self._nodes else None

    @property
    def awaits_reports(self) -> bool:
        """Whether a final report of any live worker is outstanding."""
        return any(self._is_alive(node) for node in self._nodes.values())

    def _is_alive(self, node: _Node) -> bool:
        return not node.over and self._clock() - node.reported_at < REPORT_TIMEOUT_S

    def _write(self, contents: ShareContents, report: NodeReport) -> None:
        for process in contents.processes:
            role, index = role_and_index(process)
            file, beats = self._run.ready_file(role, index), self._run.heartbeat_file(role, index)
            announced, beating = report.ready.get(process), report.heartbeats.get(process)
            if announced is None or report.over:
                file.unlink(missing_ok=True)
            elif self._run.ready_info(role, index) != (values := msgspec.structs.asdict(announced)):
                write_json(file, values)
            if beating is None or report.over:
                beats.unlink(missing_ok=True)
            else:
                with suppress(OSError):  # a full disk loses heartbeats of this machine too
                    heartbeat.write(beats, beating)
