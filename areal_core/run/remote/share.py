"""Shares of a run: what each remote worker runs, and the workers as the head node has heard of them last.

A share belongs to one worker at a time. The worker reports once a second. `GONE_S` after its last report another worker
may take the share. The head node writes the reported ready files and heartbeats into the run's folder. So ranks find
each other, and the launcher sees whether processes elsewhere are busy.
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
GONE_S = 15.0  # without a word, after which another worker may have a share
FIRST_RANK = "trainer-0"
LOGS, TIMELINE = "logs", "timeline"  # folders of a run to which processes of a share append


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Generation servers, the ranks of one of the machines that train, or reward workers."""

    role: str  # GENERATION, TRAINER or REWARDS
    first: int = 0  # number of the first server, of the machine, or of the first reward worker of other machines
    count: int | None = None  # servers or workers; None: all of the run's servers; of machines, and workers, one

    @property
    def indices(self) -> range:
        """Of servers, of workers, or of the one machine, in a share that is settled."""
        assert self.count is not None
        return range(self.first, self.first + self.count)

    @property
    def journal(self) -> str:
        """The role under which its remote worker logs."""
        return f"host-{self.role}"

    def overlaps(self, other: Share) -> bool:
        return self.role == other.role and bool(set(self.indices).intersection(other.indices))

    def settled(self, config: RunConfig) -> Share:
        """With its count. Raises ConfigError for what is no share of the run."""
        count = self.count or 1
        if self.role == REWARDS:  # beside those of the controller's machine, whatever the run has
            if self.first + count > _MOST_WORKERS:
                raise ConfigError(f"--workers: all machines may have {_MOST_WORKERS}, got {self.first + count}")
        elif self.role not in config.remote_roles:
            raise ConfigError(
                f"launch.remote_roles: must be {self.role} or both for another machine to take that role over, "
                f"got {config.launch.remote_roles!r}"
            )
        elif self.role == TRAINER:
            count, least = 1, int(config.launch.head_trains)
            if not least <= self.first < config.training.hosts:
                why = ", as training.hosts counts the head node, which is 0" if least else ""
                raise ConfigError(f"--node: must be from {least} to {config.training.hosts - 1}{why}, got {self.first}")
        elif self.first + (count := self.count or config.generation_servers) > config.generation_servers:
            raise ConfigError(
                f"--first: servers {self.first} to {self.first + count - 1} are more than the run has, "
                f"{config.generation_servers} (generation.servers); --servers says how many are here"
            )
        return replace(self, count=count)


@dataclass(frozen=True, slots=True)
class Owned:
    """What a share's machine has to itself."""

    processes: frozenset[str]  # that announce themselves and have a heartbeat: generation-0, trainer-1
    files: frozenset[tuple[str, str]]  # that they and their remote worker append to: folder and name


def role_and_index(process: str) -> tuple[str, int]:
    """Of "trainer-1"."""
    role, _, index = process.rpartition("-")
    return role, int(index)


def places(config: RunConfig, share: Share) -> range:
    """Of the reward workers of a share among all of the run's: they come after those of the controller's machine."""
    first = config.rollout.reward_workers + share.first
    return range(first, first + len(share.indices))


def owned(config: RunConfig, share: Share) -> Owned:
    """What belongs to a share that is settled."""
    if share.role == GENERATION:
        processes = [f"generation-{index}" for index in share.indices]
        vllm = known_generation(config.generation.engine).own_server  # whose timelines the controller writes
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
    return Owned(
        processes=frozenset(processes),
        files=frozenset([(LOGS, f"{name}.log") for name in logs] + [(TIMELINE, f"{name}.jsonl") for name in timelines]),
    )


class Announced(msgspec.Struct):
    """What a ready file holds."""

    pid: Count
    url: Text | None = None


class Said(msgspec.Struct):
    """What a remote worker says of itself once a second."""

    role: str
    first: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    address: Text
    over: bool = False  # these are its last words
    ready: dict[str, Announced] = {}  # by the names of processes
    heartbeats: dict[str, Heartbeat] = {}


class TakenError(ArealError):
    """A share is another worker's."""


@dataclass(slots=True)
class _Node:
    share: Share
    its: Owned
    address: str
    heard_at: float  # by the clock
    over: bool = False


class Nodes:
    """By the names that workers give themselves, which nobody else has."""

    def __init__(self, run: RunDir, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._config = config
        self._clock = clock
        self._nodes: dict[str, _Node] = {}

    def hear(self, name: str, said: Said) -> None:
        """Take what a worker says. Raises ValueError for what no worker says, TakenError."""
        if not _NAME.fullmatch(name):
            raise ValueError("node: must be letters, digits, dashes and underscores, at most 64")
        share = Share(role=said.role, first=said.first, count=said.count).settled(self._config)
        its = owned(self._config, share)
        if strange := (said.ready.keys() | said.heartbeats.keys()) - its.processes:
            raise ValueError(f"ready, heartbeats: {min(strange)[:64]!r} is none of {', '.join(sorted(its.processes))}")
        others = {one: node for one, node in self._nodes.items() if one != name and node.share.overlaps(share)}
        for node in others.values():
            if self._lives(node):
                taken = next(index for index in share.indices if index in node.share.indices)
                raise TakenError(
                    f"--head: {share.role} {taken} of run {self._run.root.name} is run by another command already, "
                    f"at {node.address}"
                )
        for gone in others:
            del self._nodes[gone]
        self._nodes[name] = _Node(share, its, said.address, self._clock(), said.over)
        self._write(its, said)

    def owned(self, name: str) -> Owned | None:
        """What a worker has to itself; None for one that has no share, or not any more."""
        return self._nodes[name].its if name in self._nodes else None

    @property
    def awaited(self) -> bool:
        """Whether any of them has still something to say."""
        return any(self._lives(node) for node in self._nodes.values())

    def _lives(self, node: _Node) -> bool:
        return not node.over and self._clock() - node.heard_at < GONE_S

    def _write(self, its: Owned, said: Said) -> None:
        for process in its.processes:
            role, index = role_and_index(process)
            file, beats = self._run.ready_file(role, index), self._run.heartbeat_file(role, index)
            announced, beating = said.ready.get(process), said.heartbeats.get(process)
            if announced is None or said.over:
                file.unlink(missing_ok=True)
            elif self._run.ready_info(role, index) != (values := msgspec.structs.asdict(announced)):
                write_json(file, values)
            if beating is None or said.over:
                beats.unlink(missing_ok=True)
            else:
                with suppress(OSError):  # on a full disk it is missing, as one of this machine would be
                    heartbeat.write(beats, beating)
