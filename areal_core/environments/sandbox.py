"""The sandbox: untrusted Python programs in namespaces of their own (bubblewrap), with limits of all that they may use.

    Sandbox("bubblewrap", memory_mib=512, processes=8).run(source, b"input", Limits(...)) -> Result

A program sees /usr and Python's folder, read only, an empty folder of its own, its own processes and devices that hold
nothing, and no network, environment variable or file beside these. It is a user of its own without capabilities, a
filter refuses it the system calls that `areal_core.environments.confinement` lists, and when its first process ends,
all others are ended by the kernel. `areal_core.environments.confined` is what starts in there and sets the limits.
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

_END_TIMEOUT_S = 30.0  # of processes that were killed
_START_TIMEOUT_S = 60.0  # of a sandbox, before its program begins
_CHUNK = 2**16
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}  # sets print the same in every run; numpy's threads
_MEND = "apt-get install bubblewrap, or environment.sandbox=none, which waives isolation"


class Status(StrEnum):
    """How a program ended. The last is the machine's doing and says nothing about the program."""

    FINISHED = "finished"
    CRASHED = "crashed"  # an exit code other than 0, a signal, or too much of memory or output
    UNPARSABLE = "unparsable"  # it does not compile
    TIMED_OUT = "timed_out"  # out of CPU time
    OVERDUE = "overdue"  # out of wall time: it slept, or the machine was busy
    FAILED = "failed"  # it did not start, or was ended from outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a program, without the start of its sandbox."""

    cpu_s: float
    wall_s: float
    output_bytes: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    status: Status
    stdout: bytes  # at most Limits.output_bytes
    cpu_s: float  # of all of its processes, from the program's start on
    wall_s: float  # the same
    error: str = ""  # why it did not start


class Sandbox:
    """What makes sandboxes, each for one program. `isolation` is environment.sandbox; `none` leaves the limits of
    single processes and nothing else."""

    def __init__(self, isolation: str, *, memory_mib: int, processes: int) -> None:
        self._isolation = isolation
        self._memory = memory_mib * 2**20
        self._processes = processes
        self._own_cpu_s = 0.0  # of a sandbox, as measured by `check`

    def check(self) -> None:
        """Raises ConfigError where programs can't be run in it."""
        if self._isolation == "none":
            logger.warning("environment.sandbox=none: programs run with the rights of this user, and limits alone")
        elif shutil.which("bwrap") is None:
            raise ConfigError(f"environment.sandbox: bubblewrap is not installed; {_MEND}")
        else:
            remove_abandoned()
        result = self.run("print(6 * 7)", b"", Limits(cpu_s=30, wall_s=60))
        if result.stdout != b"42\n":
            why = result.error or f"a first program {result.status}"
            raise ConfigError(f"environment.sandbox: {self._isolation} does not work here ({why}); {_MEND}")
        self._own_cpu_s = result.cpu_s

    def run(self, source: str, stdin: bytes, limits: Limits, *others: str) -> Result:
        """Run a program as a script; `others` are further readings of it, of which the first that compiles counts."""
        with self.start({"kind": "run", "sources": [source, *others]}, limits, stdin) as running:
            return running.finish()

    @contextlib.contextmanager
    def start(self, job: Mapping[str, Any], limits: Limits, stdin: bytes | None = None) -> Iterator[Running]:
        """A sandbox at its job (`areal_core.environments.confined`), with all of its input, or lines to come. Nothing
        of it is left at the end."""
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
    """A sandbox at work, and the pipes to it. Nothing here waits beyond the limit of wall time."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, command: Command, own_cpu_s: float) -> None:
        """`own_cpu_s`: of the sandbox itself."""
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._limits, self._own_cpu_s = process, limits, own_cpu_s
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        for pipe in (self._stdin, self._stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        self._group, self._info = command.group, command.info
        self._ended = os.pidfd_open(process.pid)
        self._said = b""  # on stderr
        self._began: float | None = None  # when the program was seen to start
        self._received = bytearray()
        self._broken: Status | None = None  # by the limit that it broke

    def send(self, line: str) -> None:
        """A program that has ended reads nothing, as `receive` will tell."""
        assert self._stdin is not None
        pipe, left = self._stdin.fileno(), memoryview(line.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while left and self._awaited(pipe, select.POLLOUT):
                left = left[os.write(pipe, left) :]

    def receive(self) -> str | None:
        """The next line; None where the program has ended, is out of time, or says too much."""
        while (end := self._received.find(b"\n")) < 0:
            if not self._more():
                return None
        line = self._received[:end].decode(errors="replace")
        del self._received[: end + 1]
        return line

    def finish(self) -> Result:
        """Wait for its end."""
        while self._more():
            pass
        self._awaited(self._ended, select.POLLIN)  # it may go on without output
        return self.result

    def _more(self) -> bool:
        """Read some of its output. False where there is none to come."""
        pipe = self._stdout.fileno()
        if not self._awaited(pipe, select.POLLIN):
            return False
        chunk = os.read(pipe, _CHUNK)
        self._received += chunk
        if len(self._received) > self._limits.output_bytes:
            self._broken = Status.CRASHED
        return bool(chunk) and self._broken is None

    def _awaited(self, pipe: int, event: int) -> bool:
        """Wait until a pipe is ready. False where the program ends before that, or has broken a limit."""
        if self._broken is None and self._began is None:
            self._start()
        if self._broken is not None or self._began is None:
            return False
        ready = self._ready(pipe, event, self._began + self._limits.wall_s)
        if not ready:
            self._broken = Status.OVERDUE
        return pipe in ready

    def _start(self) -> None:
        """Wait until the program starts, where it does."""
        pipe, deadline = self._stderr.fileno(), time.monotonic() + _START_TIMEOUT_S
        while pipe in self._ready(pipe, select.POLLIN, deadline) and (said := os.read(pipe, _CHUNK)):
            self._said += said
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
        """How it ended; it is killed where it has not. No process of it is left."""
        killed = not select.select([self._ended], [], [], 0)[0]
        if killed:
            self._kill()
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = code = os.waitstatus_to_exitcode(status)
        said = self._said + (self._stderr.read() or b"")
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
        """Of a program that was started; `code` is none where it was killed."""
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
        """All its processes are dead then: with the first one inside the kernel ends the others."""
        said = b"" if self._info is None else self._info.read() or b""
        first = json.loads(said)["child-pid"] if said else self._process.pid
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it ends by itself
            if self._info is None:
                os.killpg(first, signal.SIGKILL)
            else:
                _kill_child(first, of=self._process.pid)
        if not select.select([self._ended], [], [], _END_TIMEOUT_S)[0]:
            raise RewardError(f"a sandbox did not end within {_END_TIMEOUT_S:g} s of being killed")


def _kill_child(pid: int, *, of: int) -> None:
    """Kill a process if it is still that child, not another one that has its number by now."""
    file = os.pidfd_open(pid)
    try:
        if psutil.Process(pid).ppid() == of:
            signal.pidfd_send_signal(file, signal.SIGKILL)
    finally:
        os.close(file)
