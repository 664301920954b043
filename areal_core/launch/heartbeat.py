"""Heartbeats of processes, and the launcher's watchdogs, which find stopped and hanging processes.

    main loop --report, waiting, progressed: in memory--> heartbeat thread --one record per second--> file

The file is small: `heartbeat/<role>-<index>`. Each record is a beat. A process that is stopped, or blocked in the
kernel, writes none. Reporting its work costs the main loop nothing. Watchdogs compare records only with earlier
records, so the clocks of several machines don't matter:

    liveness    a process writes no beats: it is stopped, or blocked in the kernel (launch.liveness_timeout_s)
    progress    a busy process reports no progress, or its event loop does not run (launch.stall_timeout_s);
                the watchdog ignores processes that wait for another one
    standstill  all processes wait for each other, and nothing changes (launch.stall_timeout_s)

Each check adds a few seconds of silence at most. So a clock that jumps, or a launcher or machine that was suspended for
an hour, makes no process silent.
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

from areal_core.config.groups import LaunchConfig

FOLDER = "AREAL_HEARTBEATS"  # in the environment: folder of the heartbeat files of this run
WORK = "work"  # `waits_for` of an idle process
STORE = "the store"
STARTING = "starting"
_BEAT_S = 1.0
_RECORD_BYTES = 512  # size of every record: on a full disk a record can still be overwritten
SPECTATORS = ("tracker-", "rendezvous-", "files-")  # processes that no other process waits for
CHECK_INTERVAL_S = 1.0  # between two checks
_SILENT_AFTER_S = 5.0  # a process without a beat for longer counts as silent
_MAX_CHECK_S = 3.0  # most seconds that one check may add

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]  # the bounds protect against records from other machines
Text = Annotated[str, msgspec.Meta(max_length=200)]


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """One heartbeat record of a process."""

    pid: Count
    beats: Count
    turns: Count | None  # beats that the event loop has processed; None: the process has no event loop
    progress: Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # steps, tokens or groups that the main loop has completed
    doing: Text
    waits_for: Text | None  # a process or a part of the run; a waiting process owes no progress


_state = Heartbeat(pid=0, beats=0, turns=None, progress=0, doing=STARTING, waits_for=None)  # state of this process
_loop: asyncio.AbstractEventLoop | None = None


def start(file: Path) -> None:
    """Start the heartbeat of this process, which writes the same file until it exits.
    The first beat is written here, so that a process stopped before its thread runs is noticed too."""
    _beat(file, 1)
    threading.Thread(target=_keep_beating, args=(file,), name="heartbeat", daemon=True).start()


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Declare that the main loop of this process is the event loop `loop`, which must keep running."""
    global _loop
    _loop, _state.turns = loop, 0


def progressed() -> None:
    """Report that the main loop has completed some work."""
    _state.progress += 1


def report(doing: str, *, waits_for: str | None = None) -> None:
    """Report the main loop's activity, and the process it waits for; a change counts as progress."""
    if (doing, waits_for) != (_state.doing, _state.waits_for):
        _state.doing, _state.waits_for = doing, waits_for
        progressed()


def ready() -> None:
    """Report the end of start-up. A process that reports nothing afterwards owes no progress."""
    if _state.doing == STARTING:
        report("ready", waits_for=WORK)


@contextmanager
def waiting(waits_for: str, doing: str) -> Iterator[None]:
    """Report that the main loop waits for `waits_for` within the `with`, then restore the last report."""
    before = _state.doing, _state.waits_for
    report(doing, waits_for=waits_for)
    try:
        yield
    finally:
        report(before[0], waits_for=before[1])


def read(file: Path) -> Heartbeat | None:
    """The last record; None if there is none, or if it is being written."""
    with suppress(OSError, ValueError, TypeError):
        return Heartbeat(**json.loads(file.read_bytes()))
    return None


def _keep_beating(file: Path) -> None:
    for beats in itertools.count(2):
        time.sleep(_BEAT_S)
        _beat(file, beats)


def _beat(file: Path, beats: int) -> None:
    now = dataclasses.replace(_state, pid=os.getpid(), beats=beats)
    if _loop is not None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            _loop.call_soon_threadsafe(_count_turn)
    with suppress(OSError):  # readers notice a missing beat
        write(file, now)


def write(file: Path, heartbeat: Heartbeat) -> None:
    """Overwrite the last record in `file`. Raises OSError."""
    record = json.dumps(dataclasses.asdict(heartbeat)).encode().ljust(_RECORD_BYTES)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


def _count_turn() -> None:
    _state.turns = (_state.turns or 0) + 1


class CheckTimer:
    """Paces the checks of a watchdog and measures the seconds between them, with an upper bound."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def elapsed(self) -> float:
        """Seconds since the last check, bounded; 0 if it is too early for another check."""
        now = self._clock()
        if now - self._last < CHECK_INTERVAL_S:
            return 0.0
        self._last, elapsed = now, now - self._last
        return min(elapsed, _MAX_CHECK_S)


class Watchdog:
    """Watches one process from its start; ignores a process that never had a heartbeat."""

    def __init__(self, file: Path, pid: int, launch: LaunchConfig) -> None:
        self._file, self._pid, self._launch = file, pid, launch
        self.last: Heartbeat | None = None
        self._silent_s = self._loop_s = 0.0  # since its last beat; since its event loop's last turn
        self.still_s = 0.0  # since its last progress

    def check(self, elapsed_s: float) -> str | None:
        """Describe how the process hangs, in words that follow its name; None if it does not.
        `elapsed_s` is the time since the last check."""
        now, before = read(self._file), self.last
        if now is None or now.pid != self._pid:
            now = before  # no record yet, or a partly written one
        self.last = now
        if now is None or before is None:
            return None
        self._silent_s = self._silent_s + elapsed_s if now.beats == before.beats else 0.0
        heard_s = elapsed_s if self._silent_s <= _SILENT_AFTER_S else 0.0  # a silent process may have progressed
        self._loop_s = self._loop_s + heard_s if now.turns == before.turns else 0.0
        self.still_s = self.still_s + heard_s if now.progress == before.progress else 0.0
        liveness_s, stall_s = self._launch.liveness_timeout_s, self._launch.stall_timeout_s
        state, said = kernel_state(self._pid), describe(now)
        if self._silent_s > liveness_s:
            return f"has sent no heartbeat for {liveness_s:g} s (launch.liveness_timeout_s): {state}; {said}"
        if now.turns is not None and self._loop_s > stall_s:
            how = f"has had a blocked event loop for {stall_s:g} s (launch.stall_timeout_s)"
        elif now.waits_for is None and self.still_s > stall_s:
            how = f"has made no progress for {stall_s:g} s (launch.stall_timeout_s)"
        else:
            return None
        return f"{how}: {state}; {said} for {self.still_s:.0f} s"


class Standstill:
    """Watches all processes of a run, on all machines, by the heartbeats in its folder."""

    def __init__(self, folder: Path, launch: LaunchConfig) -> None:
        self._folder, self._launch = folder, launch
        self._last: dict[str, Heartbeat] = {}  # last record of every process
        self._still_s = 0.0

    def check(self, elapsed_s: float) -> str | None:
        """Describe how the whole run stands still; None if it does not.

        One process that is busy, or waits for the store, means no standstill. A busy or silent process has a watchdog
        of its own, and requests to the store have time limits. Spectators do not count.
        """
        files = [file for file in self._folder.iterdir() if not file.name.startswith(SPECTATORS)]
        found = {file.name: record for file in files if (record := read(file)) is not None}
        before, self._last = self._last, self._last | found
        beating = {name: now for name, now in found.items() if name not in before or before[name].beats != now.beats}
        if not beating:  # this check shows nothing
            return None
        still = all(
            now.waits_for not in (None, STORE)
            and name in before
            and (before[name].pid, before[name].progress) == (now.pid, now.progress)
            for name, now in beating.items()
        )
        self._still_s = self._still_s + elapsed_s if still else 0.0
        if self._still_s <= self._launch.stall_timeout_s:
            return None
        states = "; ".join(f"{name} {describe(now)}" for name, now in sorted(found.items()))
        return f"no process has made progress for {self._launch.stall_timeout_s:g} s (launch.stall_timeout_s): {states}"


def describe(record: Heartbeat) -> str:
    """Describe a process's heartbeat in words."""
    return record.doing if record.waits_for is None else f"{record.doing}, waiting for {record.waits_for}"


def kernel_state(pid: int) -> str:
    """The kernel's state of a process on this machine, such as "T (stopped)"; "gone" if it does not exist."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next(line.removeprefix("State:").strip() for line in lines if line.startswith("State:"))
