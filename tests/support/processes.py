"""Processes that tests start, find, wait for and kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TIMEOUT_S = 600.0  # for whatever a test waits for; what fails to come fails there


def wait_for(
    look: Callable[[], T | None],
    what: str | Callable[[], object] = "",
    timeout_s: float = TIMEOUT_S,
    *,
    pause_s: float = 0.02,
) -> T:
    """What `look` gives, once it gives something. `what` is waited for: a text, or a function that makes it."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what() if callable(what) else what}")
        time.sleep(pause_s)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def entries() -> Iterator[Path]:
    """The folders of all processes in /proc."""
    return Path("/proc").glob("[0-9]*")


def command_line(pid: int) -> str:
    """The command line of a process, with spaces; empty for one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def marked(name: str, value: str) -> list[int]:
    """Everything that runs and has this variable in its environment, in whatever session."""
    found: list[int] = []
    for entry in entries():
        with suppress(OSError):  # it has ended, or it is another user's
            if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):  # a zombie has none
                found.append(int(entry.name))
    return found


def kill_all(processes: Callable[[], Iterable[int]]) -> None:
    """SIGKILL to whatever `processes` finds, until it finds nothing: a killed one may have started others meanwhile,
    and one that is left takes the cores from the tests that follow."""

    def none_left() -> bool:
        left = list(processes())
        for pid in left:
            with suppress(ProcessLookupError):  # it went with another
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_for(none_left, lambda: f"the end of {list(processes())}, by SIGKILL", pause_s=0.05)


class Daemon:
    """`python -m COMMAND` in a session of its own, which can be killed and started again; `log` has its output."""

    def __init__(
        self, log: Path, command: list[str], environment: Mapping[str, str], *, cwd: Path | None = None
    ) -> None:
        self.log, self._command, self._environment, self._cwd = log, command, environment, cwd
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                cwd=self._cwd,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, signum: signal.Signals) -> None:
        """To all its processes; SIGSTOP leaves a server that takes connections and never answers."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """In order, if it does so in time."""
        if self._process is not None:
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self.kill()
