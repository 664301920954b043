"""The heartbeat of a process: a small file, `heartbeat/<role>-<index>`, which a thread writes once a second.

    main loop --say, waiting, progressed: in memory--> the beat's thread --a record a second--> file

Each record is a beat: a process that is stopped, or that the kernel holds, has none. What it says of its work costs the
main loop nothing. The launcher's side is `areal_core.launch.watchdog`; it compares records with earlier ones, so that
clocks of several machines don't matter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

FOLDER = "AREAL_HEARTBEATS"  # in the environment: where processes of this run have their files
WORK = "work"  # what an idle process waits for
STORE = "the store"
STARTING = "starting"
_BEAT_S = 1.0
_RECORD_BYTES = 512  # room for every record: on a full disk one can still be written over another


Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]  # bounds are for records that another machine sends
Text = Annotated[str, msgspec.Meta(max_length=200)]


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """One record of a process."""

    pid: Count
    beats: Count
    turns: Count | None  # beats that its event loop has answered; None: it has said nothing of one
    progress: Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # steps, tokens, groups: what its main loop has got done
    doing: Text
    waits_for: Text | None  # a process, or a part of the run: while it waits it owes no progress


_said = Heartbeat(pid=0, beats=0, turns=None, progress=0, doing=STARTING, waits_for=None)  # by this process, last
_loop: asyncio.AbstractEventLoop | None = None


def start(file: Path) -> None:
    """Begin to beat, in this process, which has one file for all of its life. The first beat is its own: one that is
    stopped before its thread has run is missed all the same."""
    _beat(file, 1)
    threading.Thread(target=_go_on, args=(file,), name="heartbeat", daemon=True).start()


def follow(loop: asyncio.AbstractEventLoop) -> None:
    """The main loop of this process is an event loop: from now on it has to turn."""
    global _loop
    _loop, _said.turns = loop, 0


def progressed() -> None:
    """The main loop has got something done, of what it does."""
    _said.progress += 1


def say(doing: str, *, waits_for: str | None = None) -> None:
    """What the main loop does from now on, or whom it waits for; where that is something else, it has got on."""
    if (doing, waits_for) != (_said.doing, _said.waits_for):
        _said.doing, _said.waits_for = doing, waits_for
        progressed()


def ready() -> None:
    """The start is over. A process that says nothing more owes no progress."""
    if _said.doing == STARTING:
        say("ready", waits_for=WORK)


@contextmanager
def waiting(for_whom: str, doing: str) -> Iterator[None]:
    """Within, the main loop waits for somebody; afterwards it does again what it did."""
    before = _said.doing, _said.waits_for
    say(doing, waits_for=for_whom)
    try:
        yield
    finally:
        say(before[0], waits_for=before[1])


def read(file: Path) -> Heartbeat | None:
    """The last record; None where there is none, or where it is just being written."""
    with suppress(OSError, ValueError, TypeError):
        return Heartbeat(**json.loads(file.read_bytes()))
    return None


def _go_on(file: Path) -> None:
    for beats in itertools.count(2):
        time.sleep(_BEAT_S)
        _beat(file, beats)


def _beat(file: Path, beats: int) -> None:
    now = dataclasses.replace(_said, pid=os.getpid(), beats=beats)
    if _loop is not None:
        with suppress(RuntimeError):  # it is closed: the process ends
            _loop.call_soon_threadsafe(_turn)
    with suppress(OSError):  # a beat that can't be written is missing, which is what its reader sees
        write(file, now)


def write(file: Path, heartbeat: Heartbeat) -> None:
    """Put a record in the place of the last one. Raises OSError."""
    record = json.dumps(dataclasses.asdict(heartbeat)).encode().ljust(_RECORD_BYTES)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


def _turn() -> None:
    _said.turns = (_said.turns or 0) + 1
