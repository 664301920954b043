"""Sandbox for untrusted Python programs: namespaces (bubblewrap), with limits on every resource.

    Sandbox("bubblewrap", memory_mib=512, processes=8).run(source, b"input", Limits(...)) -> Result

A program sees /usr and Python's folder, read only, and an empty folder of its own. It also sees its own processes and
devices without data. It has no network, no environment variables and no other files. It runs as its own user without
capabilities. A filter refuses the system calls listed in `areal_core.environments.confinement`. When its first process
ends, the kernel ends all others. `areal_core.environments.confined` starts inside the sandbox and sets the limits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psutil

from areal_core.environments import bubblewrap, confined
from areal_core.environments.bubblewrap import Command, remove_abandoned
from areal_core.errors import ConfigError, RewardError

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 30.0  # for killed processes to end
_START_TIMEOUT_S = 60.0  # for a sandbox to start its program
_CHUNK = 2**16
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}  # sets print the same in every run; numpy's threads
_REMEDY = "apt-get install bubblewrap, or set environment.sandbox=none to run without isolation"


class Status(StrEnum):
    """How a program ended. FAILED is the machine's fault and says nothing about the program."""

    FINISHED = "finished"
    CRASHED = "crashed"  # exit code other than 0, a signal, or too much memory or output
    UNPARSABLE = "unparsable"  # the program does not compile
    TIMED_OUT = "timed_out"  # out of CPU time
    OVERDUE = "overdue"  # out of wall time: the program slept, or the machine was busy
    FAILED = "failed"  # the program did not start, or was killed from outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a program, excluding the start of its sandbox."""

    cpu_s: float
    wall_s: float
    output_bytes: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    status: Status
    stdout: bytes  # at most Limits.output_bytes
    cpu_s: float  # of all its processes, since the program's start
    wall_s: float  # since the program's start
    error: str = ""  # why the program did not start


class Sandbox:
    """Creates sandboxes, each for one program.

    `isolation` is environment.sandbox; `none` leaves only the limits of single processes.
    """

    def __init__(self, isolation: str, *, memory_mib: int, processes: int) -> None:
        self._isolation = isolation
        self._memory = memory_mib * 2**20
        self._processes = processes
        self._own_cpu_s = 0.0  # CPU time of an empty sandbox, measured by `check`

    def check(self) -> None:
        """Raise ConfigError if programs can't run in this sandbox."""
        if self._isolation == "none":
            logger.warning(
                "environment.sandbox=none: programs run with this user's rights, restricted only by resource limits"
            )
        elif shutil.which("bwrap") is None:
            raise ConfigError(f"environment.sandbox: bubblewrap is not installed; {_REMEDY}")
        else:
            remove_abandoned()
        result = self.run("print(6 * 7)", b"", Limits(cpu_s=30, wall_s=60))
        if result.stdout != b"42\n":
            why = result.error or f"a test program {result.status}"
            raise ConfigError(f"environment.sandbox: {self._isolation} does not work here ({why}); {_REMEDY}")
        self._own_cpu_s = result.cpu_s

    def run(self, source: str, stdin: bytes, limits: Limits, *others: str) -> Result:
        """Run a program as a script.
        `others` are further readings of it; the first reading that compiles counts."""
        with self.start({"kind": "run", "sources": [source, *others]}, limits, stdin) as running:
            return running.finish()

    @contextlib.contextmanager
    def start(self, job: Mapping[str, Any], limits: Limits, stdin: bytes | None = None) -> Iterator[Running]:
        """Start a sandbox with a job (`areal_core.environments.confined`).
        `stdin` is its whole input; None: send lines later. When the context ends, nothing of the sandbox remains."""
        with contextlib.ExitStack() as stack:
            given = stack.enter_context(bubblewrap.in_memory(json.dumps(job).encode()))
            source = subprocess.PIPE if stdin is None else stack.enter_context(bubblewrap.in_memory(stdin))
            settings = {
                "job": given.fileno(),
                "cpu_s": math.ceil(limits.cpu_s),
                "memory_bytes": self._memory,
                "file_bytes": bubblewrap.FOLDER_BYTES,
                "packages": [str(path.parent) for path in bubblewrap.packages()],
            }
            if self._isolation == "none":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-program-"))
                command = bubblewrap.Command(bubblewrap.python(confined.__file__, settings), (), None, None)
            else:
                folder, command = "/", stack.enter_context(bubblewrap.command(settings, self._processes))
            process = subprocess.Popen(
                command.words,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[given.fileno(), *command.passed],
                env=_ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )
            running = Running(process, limits, command, self._own_cpu_s)
            stack.callback(lambda: running.result)
            yield running


class Running:
    """A running sandbox and the pipes to it. No method waits beyond the wall-time limit."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, command: Command, own_cpu_s: float) -> None:
        """`own_cpu_s` is the CPU time of the sandbox itself, in seconds."""
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._limits, self._own_cpu_s = process, limits, own_cpu_s
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        for pipe in (self._stdin, self._stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        self._group, self._info = command.group, command.info
        self._ended = os.pidfd_open(process.pid)
        self._stderr_text = b""  # text from stderr
        self._began: float | None = None  # when the program's start was seen
        self._received = bytearray()
        self._broken: Status | None = None  # status for the limit that the program exceeded

    def send(self, line: str) -> None:
        """Send a line. If the program has ended, the line is lost; `receive` reports the end."""
        assert self._stdin is not None
        pipe, left = self._stdin.fileno(), memoryview(line.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while left and self._awaited(pipe, select.POLLOUT):
                left = left[os.write(pipe, left) :]

    def receive(self) -> str | None:
        """Receive the next line; None if the program has ended, is out of time, or exceeds its output limit."""
        while (end := self._received.find(b"\n")) < 0:
            if not self._more():
                return None
        line = self._received[:end].decode(errors="replace")
        del self._received[: end + 1]
        return line

    def finish(self) -> Result:
        """Wait until the program ends."""
        while self._more():
            pass
        self._awaited(self._ended, select.POLLIN)  # the program may continue without output
        return self.result

    def _more(self) -> bool:
        """Read some output. Returns False if no more will come."""
        pipe = self._stdout.fileno()
        if not self._awaited(pipe, select.POLLIN):
            return False
        chunk = os.read(pipe, _CHUNK)
        self._received += chunk
        if len(self._received) > self._limits.output_bytes:
            self._broken = Status.CRASHED
        return bool(chunk) and self._broken is None

    def _awaited(self, pipe: int, event: int) -> bool:
        """Wait until a pipe is ready. Returns False if the program ends first or has exceeded a limit."""
        if self._broken is None and self._began is None:
            self._start()
        if self._broken is not None or self._began is None:
            return False
        ready = self._ready(pipe, event, self._began + self._limits.wall_s)
        if not ready:
            self._broken = Status.OVERDUE
        return pipe in ready

    def _start(self) -> None:
        """Wait until the program has started or failed to start."""
        pipe, deadline = self._stderr.fileno(), time.monotonic() + _START_TIMEOUT_S
        while pipe in self._ready(pipe, select.POLLIN, deadline) and (said := os.read(pipe, _CHUNK)):
            self._stderr_text += said
            if confined.STARTED in said:
                self._began = time.monotonic()
                return
        self._broken = Status.FAILED

    def _ready(self, pipe: int, event: int, deadline: float) -> set[int]:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        poll.register(pipe, event)
        return {number for number, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)}

    @functools.cached_property
    def result(self) -> Result:
        """How the program ended; kills it if it still runs. None of its processes remain."""
        killed = not select.select([self._ended], [], [], 0)[0]
        if killed:
            self._kill()
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = code = os.waitstatus_to_exitcode(status)
        said = self._stderr_text + (self._stderr.read() or b"")
        for pipe in (self._stdin, self._stdout, self._stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._ended)
        cpu_s = max(0.0, used.ru_utime + used.ru_stime - self._own_cpu_s)
        started = confined.STARTED in said
        lost = code < 0 and self._info is not None and not killed  # bubblewrap itself was killed
        return Result(
            status=self._status(None if killed else code, cpu_s) if started and not lost else Status.FAILED,
            stdout=bytes(self._received[: self._limits.output_bytes]),
            cpu_s=cpu_s,
            wall_s=0.0 if self._began is None else time.monotonic() - self._began,
            error="" if started else said.decode(errors="replace").strip().rpartition("\n")[2],
        )

    def _status(self, code: int | None, cpu_s: float) -> Status:
        """Status of a program that had started. `code` is its exit code, None if it was killed."""
        if self._group is not None and self._group.ran_out():
            return Status.CRASHED
        if cpu_s >= self._limits.cpu_s:
            return Status.TIMED_OUT
        if self._broken is not None or code in (None, 0):
            return self._broken or Status.FINISHED
        if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
            return Status.TIMED_OUT
        return Status.UNPARSABLE if code == confined.UNPARSABLE else Status.CRASHED

    def _kill(self) -> None:
        """Kill all processes of the sandbox. With the first one inside, the kernel ends the others."""
        said = b"" if self._info is None else self._info.read() or b""
        first = json.loads(said)["child-pid"] if said else self._process.pid
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # the process ends by itself
            if self._info is None:
                os.killpg(first, signal.SIGKILL)
            else:
                _kill_child(first, of=self._process.pid)
        if not select.select([self._ended], [], [], _END_TIMEOUT_S)[0]:
            raise RewardError(f"a sandbox did not exit within {_END_TIMEOUT_S:g} s of SIGKILL")


def _kill_child(pid: int, *, of: int) -> None:
    """Kill a process if it is still a child of `of`, and not a new process with the same id."""
    file = os.pidfd_open(pid)
    try:
        if psutil.Process(pid).ppid() == of:
            signal.pidfd_send_signal(file, signal.SIGKILL)
    finally:
        os.close(file)
