"""The remote workers of a run, as its head node has heard of them last.

A share is one worker's at a time: who has it says so once a second, and for `GONE_S` after the last time nobody else
gets it. What it says of its processes stands in the run's folder as if they were here: ready files, by which ranks are
waited for, and heartbeats, by which a run that stands still is told from one that is busy elsewhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError
from areal_core.launch import heartbeat
from areal_core.launch.heartbeat import Count, Heartbeat, Text
from areal_core.run.remote.share import Owned, Share, owned
from areal_core.storage.rundir import RunDir, write_json

GONE_S = 15.0  # without a word, after which another worker may have a share
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
            role, _, index = process.rpartition("-")
            file, beats = self._run.ready_file(role, int(index)), self._run.heartbeat_file(role, int(index))
            announced, beating = said.ready.get(process), said.heartbeats.get(process)
            if announced is None or said.over:
                file.unlink(missing_ok=True)
            elif self._run.ready_info(role, int(index)) != (values := msgspec.structs.asdict(announced)):
                write_json(file, values)
            if beating is None or said.over:
                beats.unlink(missing_ok=True)
            else:
                with suppress(OSError):  # on a full disk it is missing, as one of this machine would be
                    heartbeat.write(beats, beating)
