"""The heartbeat of a process, and the launcher's watchdogs, which find a process that is stopped or hangs.

    main loop --say, waiting, progressed: in memory--> the beat's thread --a record a second--> file

The file is small: `heartbeat/<role>-<index>`. Each record is a beat: a process that is stopped, or that the kernel
holds, has none. What it says of its work costs the main loop nothing. Watchdogs compare records with earlier ones, so
that clocks of several machines don't matter:

    liveness    a process has no beat: it is stopped, or the kernel holds it (launch.liveness_timeout_s)
    progress    it is busy, and what it says of its work does not change, or its event loop does not turn
                (launch.stall_timeout_s); one that waits for another owes no progress
    standstill  all of them wait for each other, and nothing changes (launch.stall_timeout_s)

Silence is counted over looks, each for a few seconds at most: a clock that jumps, or a launcher or a machine that was
stopped for an hour, makes nobody silent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from areal_core.config.schema import LaunchConfig

FOLDER = "AREAL_HEARTBEATS"  # in the environment: where processes of this run have their files
WORK = "work"  # what an idle process waits for
STORE = "the store"
STARTING = "starting"
_BEAT_S = 1.0
_RECORD_BYTES = 512  # room for every record: on a full disk one can still be written over another
SPECTATORS = ("tracker-", "rendezvous-", "files-")  # nothing waits for them
LOOK_S = 1.0  # between two looks
_BEATS_S = 5.0  # within which a process that is not silent has a beat
_LOOK_MOST_S = 3.0  # that one look may count for

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


class Looks:
    """When to look, and the seconds since the look before, as far as they count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def elapsed(self) -> float:
        """0 while it is too early for another look."""
        now = self._clock()
        if now - self._last < LOOK_S:
            return 0.0
        self._last, elapsed = now, now - self._last
        return min(elapsed, _LOOK_MOST_S)


class Watchdog:
    """Watches one process from its start on. Says nothing of one that has never had a heartbeat."""

    def __init__(self, file: Path, pid: int, launch: LaunchConfig) -> None:
        self._file, self._pid, self._launch = file, pid, launch
        self.last: Heartbeat | None = None
        self._silent_s = self._loop_s = 0.0  # since its last beat, since its event loop's last turn
        self.still_s = 0.0  # since it has last got on

    def look(self, elapsed_s: float) -> str | None:
        """How it hangs, in words that follow its name; None while it does not. `elapsed_s`: since the last look."""
        now, before = read(self._file), self.last
        if now is None or now.pid != self._pid:
            now = before  # none yet, or half written
        self.last = now
        if now is None or before is None:
            return None
        self._silent_s = self._silent_s + elapsed_s if now.beats == before.beats else 0.0
        heard_s = elapsed_s if self._silent_s <= _BEATS_S else 0.0  # of one that is silent no more is known
        self._loop_s = self._loop_s + heard_s if now.turns == before.turns else 0.0
        self.still_s = self.still_s + heard_s if now.progress == before.progress else 0.0
        liveness_s, stall_s = self._launch.liveness_timeout_s, self._launch.stall_timeout_s
        state, said = kernel_state(self._pid), described(now)
        if self._silent_s > liveness_s:
            return f"has given no sign of life for {liveness_s:g} s (launch.liveness_timeout_s): {state}; {said}"
        if now.turns is not None and self._loop_s > stall_s:
            how = f"has an event loop that stands still for {stall_s:g} s (launch.stall_timeout_s)"
        elif now.waits_for is None and self.still_s > stall_s:
            how = f"has made no progress for {stall_s:g} s (launch.stall_timeout_s)"
        else:
            return None
        return f"{how}: {state}; {said} since {self.still_s:.0f} s"


class Standstill:
    """Watches all processes of a run, on whatever machine, by their heartbeats in its folder."""

    def __init__(self, folder: Path, launch: LaunchConfig) -> None:
        self._folder, self._launch = folder, launch
        self._last: dict[str, Heartbeat] = {}  # of every process
        self._still_s = 0.0

    def look(self, elapsed_s: float) -> str | None:
        """How the run stands still; None while it does not. One process that is busy or waits for the store is enough
        for that: the first has a watchdog of its own, and the store's requests have bounds. One that is silent has a
        watchdog, too; spectators do not count."""
        files = [file for file in self._folder.iterdir() if not file.name.startswith(SPECTATORS)]
        found = {file.name: said for file in files if (said := read(file)) is not None}
        before, self._last = self._last, self._last | found
        beating = {name: said for name, said in found.items() if name not in before or before[name].beats != said.beats}
        if not beating:  # this look shows nothing
            return None
        still = all(
            said.waits_for not in (None, STORE)
            and name in before
            and (before[name].pid, before[name].progress) == (said.pid, said.progress)
            for name, said in beating.items()
        )
        self._still_s = self._still_s + elapsed_s if still else 0.0
        if self._still_s <= self._launch.stall_timeout_s:
            return None
        said = "; ".join(f"{name} {described(said)}" for name, said in sorted(found.items()))
        return f"no process has got on for {self._launch.stall_timeout_s:g} s (launch.stall_timeout_s): {said}"


def described(said: Heartbeat) -> str:
    """What a process has said of itself, in words."""
    return said.doing if said.waits_for is None else f"{said.doing}, waiting for {said.waits_for}"


def kernel_state(pid: int) -> str:
    """The state of a process of this machine, as the kernel has it: "T (stopped)"; "gone" where it has none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next(line.removeprefix("State:").strip() for line in lines if line.startswith("State:"))
