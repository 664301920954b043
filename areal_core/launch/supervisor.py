"""Start, watch and end the processes of one role, so that none is left behind.

A process is *started* in its own session with its own log. It is *ready* once it has written its ready file. A process
that *ends* with 0 is done; otherwise it is restarted until its restarts are spent. A hanging process is killed first.
All waiting is one poll for an exit (pidfd) or the stop signal. A few times a second the supervisor reads ready files
and logs, and checks start timeouts. Once a second it reads heartbeats. `areal_core.launch.process` is the child's side.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from areal_core.config.groups import LaunchConfig
from areal_core.errors import ProcessError, UserCodeError
from areal_core.launch import children, heartbeat, logs, process
from areal_core.launch.heartbeat import CheckTimer, Watchdog, kernel_state
from areal_core.launch.sweeper import end_marked, poll
from areal_core.storage.rundir import RunDir


class RestartBudget:
    """Restarts of one process: at most `most`, refilled by one every `refill_s` seconds of monotonic time."""

    def __init__(self, most: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.total = 0  # restarts used so far
        self._refill_s = refill_s
        self._clock = clock
        self._left, self._at = float(most), clock()

    def take(self) -> bool:
        """Use one restart; returns False if none is left."""
        self._refill()
        if self._left < 1.0:
            return False
        self._left -= 1.0
        self.total += 1
        return True

    @property
    def spent(self) -> int:
        """Restarts used and not yet refilled."""
        return self.most - math.floor(self._left)

    def next_s(self) -> float:
        """Seconds until a restart is available; infinite if there never is one."""
        self._refill()
        return max(0.0, 1.0 - self._left) * self._refill_s if self.most else math.inf

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(float(self.most), self._left + (now - self._at) / self._refill_s)
        self._at = now


ATTEMPT = "AREAL_ATTEMPT"  # shared by processes of a role that start together; never reused

# Set before torch is imported: one thread per process, idle threads that don't spin, large activations kept mapped.
# Larger blocks, such as a copy of a large model, are returned when freed: each would leave a hole in the heap.
CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",  # some data sets of reasoning-gym depend on the order of sets
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
_START_POLL_S, _POLL_S = 0.05, 0.25  # between two checks of ready files and logs: during start-up, and later
_STACKS_S = 1.0  # time for a process to write its stacks
_RETRY_S = 0.1  # poll interval where the kernel sends no event
_NICE_S = 10.0  # time for the kernel to accept a session's nice value


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """How to start the processes of one role; callables get the process's index."""

    name: str
    argv: Callable[[int], list[str]]
    count: int = 1
    first: int = 0  # index of the first process
    nice: int = 0  # applied once ready: start-up is not background work
    cpus: frozenset[int] | None = None  # cores that it may use; None: all
    env: Callable[[int], Mapping[str, str]] = lambda index: {}
    announces: bool = True  # writes a ready file
    exits: bool = True  # ends by itself with 0; otherwise every exit is a failure
    sessions: bool = False  # starts processes in their own sessions; leftovers are killed when it ends
    spare: bool = False  # the others continue without a process that has no restart, until its next refill
    gang: bool = False  # its processes depend on each other: if one fails, all are restarted
    final: int | None = None  # exit status after which it is not restarted: its own restarts are spent

    @property
    def indices(self) -> range:
        return range(self.first, self.first + self.count)


class StopSignal:
    """An event that `poll` can wait for. Once set, it stays set."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def is_set(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; returns whether the signal is set."""
        return bool(poll([self._fd], timeout_s))


class FileLock(contextlib.AbstractContextManager["FileLock"]):
    """An exclusive lock on a file, held by this process and by children that inherit `fd`.

    The lock is free once all of them have released it or ended. Raises ProcessError with the message `busy` if the lock
    isn't free within `timeout_s`.
    """

    def __init__(self, path: Path, *, timeout_s: float, busy: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + timeout_s
        while True:  # flock() has no timeout, and a release sends no event
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self.fd)
                    raise ProcessError(busy) from None
            time.sleep(_RETRY_S)

    def release(self) -> None:
        os.close(self.fd)

    @staticmethod
    def is_held(path: Path) -> bool:
        """Whether any process holds the lock on this file."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class Supervisor:
    """Runs the processes of one role. `run` spawns from the calling thread, as PDEATHSIG follows threads."""

    run_dir: RunDir
    spec: RoleSpec
    launch: LaunchConfig
    _: KW_ONLY
    stop: StopSignal
    on_ready: Callable[[int, dict[str, Any]], None] | None = None
    log: Callable[[str], None] = print  # receives events of the processes
    forward: Callable[[str], None] | None = None  # receives their log lines; None: `log` does
    pass_fds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        launch, spec = self.launch, self.spec
        self._children: dict[int, _Member] = {}
        self._absent: dict[int, float] = {}  # index -> monotonic time of restart; the others go on without
        self._budgets = {index: RestartBudget(launch.restarts, launch.restart_refill_s) for index in spec.indices}
        self._check_timer = CheckTimer()
        self.explains = False  # whether processes write their stacks to their logs before they are stopped

    def run(self) -> None:
        """Block until every process has exited with 0, or `stop` is set; then no process is left.

        Raises ProcessError if a process has no restart left and failed, hung or wasn't ready within
        `launch.start_timeout_s`. Raises UserCodeError for a bug in user code. No process is left after an error either.
        """
        if self.stop.is_set():
            return
        try:
            self._start(self.spec.indices)
            while self._children:
                fds = {self.stop.fileno(), *(child.process.pidfd for child in self._children.values())}
                starting = any(child.deadline < math.inf for child in self._children.values())
                happened = poll(fds, _START_POLL_S if starting else _POLL_S)
                for child in list(self._children.values()):
                    self._notice_ready(child)
                    self._forward_log(child)
                if self.stop.is_set():
                    return
                self._handle_ends(happened)
                self._start_absent()
                self._kill_hung()
        except BaseException:  # for instance a listener with a broken pipe: call no listener again
            self.log = self.forward = lambda _: None
            raise
        finally:
            for child in self._children.values():
                if self.explains and child.ready and child.watchdog.last is not None:
                    self._stacks(child)
            self._terminate(list(self._children.values()))

    def _handle_ends(self, happened: set[int]) -> None:
        for child in list(self._children.values()):
            if self._children.get(child.index) is not child:
                continue  # a failed sibling of its gang already ended it
            if child.process.pidfd in happened:
                code = self._reap(child)
                if code != 0 or not self.spec.exits:
                    if code == process.EXIT_USER_CODE:
                        said = child.process.log.last_lines(child.process.name, count=50)
                        raise UserCodeError(said.rpartition("areal: error: ")[2].partition(" | ")[0])
                    self._recover(child, children.how_it_ended(code), final=code == self.spec.final)
            elif time.monotonic() >= child.deadline:
                self._terminate([child])
                self._recover(child, f"was not ready within {self.launch.start_timeout_s:g} s (launch.start_timeout_s)")

    def _recover(self, child: _Member, how: str, *, final: bool = False) -> None:
        """Restart a failed process, with its gang, or continue without it.
        Raises ProcessError if its restarts are spent and the others can't continue."""
        name, log, budget = child.process.name, child.process.log, self._budgets[child.index]
        if not final and budget.take():
            self.log(f"{name} {how}: restart {budget.spent} of {budget.most}")
            if self.spec.gang:
                self._terminate(list(self._children.values()))
                self._start(self.spec.indices)
            else:
                self._start([child.index])
        elif self.spec.spare and not final and self._children:
            self._absent[child.index] = time.monotonic() + (wait_s := budget.next_s())
            again = f"next restart in {wait_s:.0f} s" if wait_s < math.inf else "no next restart"
            left = f"{len(self._children)} of {self.spec.count} continue"
            self.log(f"{name} {how}, and has no restarts left: {left}, {again}; see {log.path}")
        else:
            after = f" after {budget.total} restarts" if budget.total else ""
            raise ProcessError(f"{name} {how}{after}; {log.path} ends: {log.last_lines(name)}")

    def _start_absent(self) -> None:
        for index, at in list(self._absent.items()):
            if time.monotonic() >= at and (budget := self._budgets[index]).take():
                del self._absent[index]
                self.log(f"{self.spec.name}-{index} can restart again: restart {budget.spent} of {budget.most}")
                self._start([index])

    def _kill_hung(self) -> None:
        """Kill a hanging process and recover.
        If several hang, kill the one without progress for longest: the others may be waiting for it."""
        if not (elapsed_s := self._check_timer.elapsed()):
            return
        children.sweeper.check()
        ready = [child for child in self._children.values() if child.ready]
        hung = [(child, how) for child in ready if (how := child.watchdog.check(elapsed_s)) is not None]
        if hung:
            child, how = max(hung, key=lambda found: found[0].watchdog.still_s)
            stacks = self._stacks(child)
            child.process.send(signal.SIGKILL)
            self._reap(child)
            self._recover(child, f"{how}; {stacks}: killed")

    def _stacks(self, child: _Member) -> str:
        """Make a process write its threads' stacks to its log; returns the result in words.
        Only a process with a heartbeat has a handler for the signal."""
        if kernel_state(child.process.pid).startswith(("T", "t")):
            return "its stacks are not available"
        child.process.send(process.STACKS)
        time.sleep(_STACKS_S)
        return f"its stacks are in {child.process.log.path}"

    def _start(self, indices: Iterable[int]) -> None:
        attempt = secrets.token_hex(8)
        for index in indices:
            self._spawn(index, attempt)

    def _spawn(self, index: int, attempt: str) -> None:
        spec, name = self.spec, self.spec.name
        self.run_dir.ready_file(name, index).unlink(missing_ok=True)
        settings = {ATTEMPT: attempt, logs.INDEX: str(index), heartbeat.FOLDER: str(self.run_dir.heartbeats)}
        path = self.run_dir.log_file(name, index)
        try:
            started = children.start(
                f"{name}-{index}",
                spec.argv(index),
                log=logs.LogFile(path),
                environment={**CHILD_ENV, **spec.env(index), **settings},
                grace_s=self.launch.stop_timeout_s,
                pass_fds=self.pass_fds,
            )
        except OSError as error:
            raise ProcessError(f"can't start {name}-{index}: {error}") from error
        deadline = time.monotonic() + self.launch.start_timeout_s if spec.announces else math.inf
        watchdog = Watchdog(self.run_dir.heartbeat_file(name, index), started.pid, self.launch)
        self._children[index] = _Member(index, attempt, started, deadline, watchdog)
        with contextlib.suppress(ProcessLookupError):  # the process may have ended already: the pidfd will report it
            if spec.cpus:
                os.sched_setaffinity(started.pid, spec.cpus)

    def _notice_ready(self, child: _Member) -> None:
        if child.ready or not self.spec.announces:
            return
        info = self.run_dir.ready_info(self.spec.name, child.index)
        if info is None or info["pid"] != child.process.pid:  # ready file of a dying process of an earlier launcher
            return
        child.ready, child.deadline = True, math.inf
        try:
            _be_nice(child.process.pid, self.spec.nice)
        except OSError as error:  # slower, but still correct
            self.log(f"{child.process.name} continues without nice {self.spec.nice}: {error}")
        if self.on_ready is not None:
            self.on_ready(child.index, info)

    def _terminate(self, ending: list[_Member]) -> None:
        """Send SIGTERM to each process, and SIGKILL to its process group after `launch.stop_timeout_s`."""
        for child in ending:
            child.process.send(signal.SIGTERM)
        deadline = time.monotonic() + self.launch.stop_timeout_s
        left = {child.process.pidfd: child for child in ending}
        failure: BaseException | None = None  # error of a listener or a log: raised once all processes have ended
        while left:
            ended = poll(left, max(0.0, deadline - time.monotonic()))
            for pidfd in ended or list(left):
                child = left.pop(pidfd)
                try:
                    self._reap(child)
                    if not ended:
                        said = f"did not end within {self.launch.stop_timeout_s:g} s of SIGTERM: killed"
                        self.log(f"{child.process.name} {said}")
                except BaseException as error:  # noqa: BLE001 - the others must end, too
                    failure = failure or error
        if failure is not None:
            raise failure

    def _reap(self, child: _Member) -> int:
        """Collect a process and kill everything that it has started.
        With `sessions` this kills all processes of the attempt; the launcher's own ones have already ended."""
        code = child.process.reap()
        if self.spec.sessions:
            end_marked(f"{ATTEMPT}={child.attempt}", 0.0)
        del self._children[child.index]
        self.run_dir.heartbeat_file(self.spec.name, child.index).unlink(missing_ok=True)
        self._forward_log(child)
        return code

    def _forward_log(self, child: _Member) -> None:
        name = child.process.name
        for line in child.process.log.new_lines():
            (self.forward or self.log)(f"{name}: {logs.plain(line, name)[: logs.LINE_CHARS]}")


@dataclass
class _Member:
    """One process of the role."""

    index: int
    attempt: str
    process: children.Child
    deadline: float  # monotonic time by which it must be ready
    watchdog: Watchdog
    ready: bool = False


def _be_nice(pid: int, nice: int) -> None:
    """Lower a process's priority below other processes of the run. Raises OSError if the kernel refuses.

    With autogroups, nice values count only within a session, and each process of a run has its own. So this also sets
    the nice value of the group (man 7 sched). Does nothing if `nice` is 0.
    """
    if not nice:
        return
    group, deadline = Path(f"/proc/{pid}/autogroup"), time.monotonic() + _NICE_S
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended, or the kernel has no autogroups
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        while True:
            try:
                group.write_text(f"{nice}\n")
                return
            except BlockingIOError:  # non-root users may set one value every 0.1 s
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)
