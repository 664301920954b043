"""The parent's side of process control: starts the processes of one role, watches them, and leaves none behind.

A process is *started* (in a session and with a log of its own), then *ready* (it has written its ready
file), then *ended*: with 0 it is done, otherwise it is started again until its restarts are spent. One that hangs is
killed first. All waiting is one poll for an exit (pidfd) or the stop signal. A few times a second the supervisor looks
at ready files, logs and starts that take too long; once a second it looks at heartbeats. `areal_core.launch.process` is
the child's side.
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

from areal_core.config.schema import LaunchConfig
from areal_core.errors import ProcessError, UserCodeError
from areal_core.launch import children, heartbeat, logs, process
from areal_core.launch.heartbeat import Looks, Watchdog, kernel_state
from areal_core.launch.sweeper import end_marked, poll
from areal_core.storage.rundir import RunDir


class RestartBudget:
    """Restarts of one process: `most` of them at once, and one comes back every `refill_s`, in monotonic time."""

    def __init__(self, most: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.total = 0  # taken so far
        self._refill_s = refill_s
        self._clock = clock
        self._left, self._at = float(most), clock()

    def take(self) -> bool:
        """Take one, if there is one."""
        self._refill()
        if self._left < 1.0:
            return False
        self._left -= 1.0
        self.total += 1
        return True

    @property
    def spent(self) -> int:
        """Those that have not come back."""
        return self.most - math.floor(self._left)

    def next_s(self) -> float:
        """Seconds until there is one; infinite where there never is."""
        self._refill()
        return max(0.0, 1.0 - self._left) * self._refill_s if self.most else math.inf

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(float(self.most), self._left + (now - self._at) / self._refill_s)
        self._at = now


ATTEMPT = "AREAL_ATTEMPT"  # the same for all processes of a role that were started together, never used twice

# Set before torch is imported: one thread a process, idle threads that don't spin, large activations kept mapped. What
# is larger, a copy of all weights of a large model, goes back when it is freed: kept, each would leave a hole.
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
_STARTING_S, _TURN_S = 0.05, 0.25  # between two looks at ready files and logs: while a process starts, and later
_STACKS_S = 1.0  # for a process to write its stacks
_RETRY_S = 0.1  # where the kernel tells of no change
_NICE_S = 10.0  # for the kernel to take a session's nice value


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What the processes of one role are started with; callables get the process's index."""

    name: str
    argv: Callable[[int], list[str]]
    count: int = 1
    first: int = 0  # index of the first one
    nice: int = 0  # once it is ready: the start of a process is nobody's background work
    cpus: frozenset[int] | None = None  # cores that it may use; None: all
    env: Callable[[int], Mapping[str, str]] = lambda index: {}
    announces: bool = True  # writes a ready file
    exits: bool = True  # ends by itself with 0; otherwise every exit is a failure
    sessions: bool = False  # starts processes in sessions of their own: what is left of them is killed after it
    spare: bool = False  # the others go on without one whose restarts are spent, until one comes back
    gang: bool = False  # its processes depend on each other: when one fails all are started again
    final: int | None = None  # exit status after which a process is not started again: it has had restarts of its own

    @property
    def indices(self) -> range:
        return range(self.first, self.first + self.count)


class StopSignal:
    """An event that `poll` can wait for. Once set it stays set."""

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
        """Whether it was set within `timeout_s`."""
        return bool(poll([self._fd], timeout_s))


class FileLock(contextlib.AbstractContextManager["FileLock"]):
    """An exclusive lock on a file, of this process and of those that `fd` was handed down to: it is free again when all
    of them have released it or are gone.

    Raises ProcessError with the line `busy` when it isn't free within `timeout_s`.
    """

    def __init__(self, path: Path, *, timeout_s: float, busy: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + timeout_s
        while True:  # flock() knows no timeout, and nothing tells of a release
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
        """Whether somebody holds the lock on this file."""
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
    """Runs the processes of one role. `run` spawns from the calling thread: PDEATHSIG follows the spawning thread."""

    run_dir: RunDir
    spec: RoleSpec
    launch: LaunchConfig
    _: KW_ONLY
    stop: StopSignal
    on_ready: Callable[[int, dict[str, Any]], None] | None = None
    log: Callable[[str], None] = print  # is told what happens to the processes
    forward: Callable[[str], None] | None = None  # is told what they log; None: `log` is
    pass_fds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        launch, spec = self.launch, self.spec
        self._children: dict[int, _Member] = {}
        self._absent: dict[int, float] = {}  # those that the others go on without, and when they start, monotonic
        self._budgets = {index: RestartBudget(launch.restarts, launch.restart_refill_s) for index in spec.indices}
        self._looks = Looks()
        self.explains = False  # whether processes that are stopped now leave their stacks in their logs first

    def run(self) -> None:
        """Block until every process has exited with 0, or `stop` is set. No process is left, however it returns.

        Raises ProcessError when a process failed, hung or wasn't ready in `launch.start_timeout_s` and has no restart
        left.
        """
        if self.stop.is_set():
            return
        try:
            self._start(self.spec.indices)
            while self._children:
                fds = {self.stop.fileno(), *(child.process.pidfd for child in self._children.values())}
                starting = any(child.deadline < math.inf for child in self._children.values())
                happened = poll(fds, _STARTING_S if starting else _TURN_S)
                for child in list(self._children.values()):
                    self._notice_ready(child)
                    self._forward_log(child)
                if self.stop.is_set():
                    return
                self._handle_ends(happened)
                self._start_absent()
                self._look_for_hung()
        except BaseException:  # of a listener whose pipe is broken, for instance: none is told anything again
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
                continue  # a failed sibling took it down
            if child.process.pidfd in happened:
                code = self._reap(child)
                if code != 0 or not self.spec.exits:
                    if code == process.HOPELESS:
                        said = child.process.log.last_lines(child.process.name, count=50)
                        raise UserCodeError(said.rpartition("areal: error: ")[2].partition(" | ")[0])
                    self._recover(child, children.how_it_ended(code), final=code == self.spec.final)
            elif time.monotonic() >= child.deadline:
                self._terminate([child])
                self._recover(child, f"was not ready within {self.launch.start_timeout_s:g} s (launch.start_timeout_s)")

    def _recover(self, child: _Member, how: str, *, final: bool = False) -> None:
        """Start a failed process again, with its gang, or go on without it. Raises ProcessError when its restarts are
        spent and nobody can."""
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
            again = f"it is started again in {wait_s:.0f} s" if wait_s < math.inf else "it has none"
            left = f"{len(self._children)} of {self.spec.count} go on"
            self.log(f"{name} {how}, and its restarts are spent: {left}, {again}; {log.path} has more")
        else:
            after = f" after {budget.total} restarts" if budget.total else ""
            raise ProcessError(f"{name} {how}{after}; {log.path} ends: {log.last_lines(name)}")

    def _start_absent(self) -> None:
        for index, at in list(self._absent.items()):
            if time.monotonic() >= at and (budget := self._budgets[index]).take():
                del self._absent[index]
                self.log(f"{self.spec.name}-{index} has a restart again: restart {budget.spent} of {budget.most}")
                self._start([index])

    def _look_for_hung(self) -> None:
        """Kill a process that hangs, and recover. Of several the one that has stood still for longest: others may have
        come to wait for it."""
        if not (elapsed_s := self._looks.elapsed()):
            return
        children.sweeper.check()
        ready = [child for child in self._children.values() if child.ready]
        hung = [(child, how) for child in ready if (how := child.watchdog.look(elapsed_s)) is not None]
        if hung:
            child, how = max(hung, key=lambda found: found[0].watchdog.still_s)
            stacks = self._stacks(child)
            child.process.send(signal.SIGKILL)
            self._reap(child)
            self._recover(child, f"{how}; {stacks}: killed")

    def _stacks(self, child: _Member) -> str:
        """Have a process write the stacks of its threads into its log; what became of it. One that has a heartbeat has
        a handler for the signal."""
        if kernel_state(child.process.pid).startswith(("T", "t")):
            return "its stacks can't be told"
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
        settings = {
            ATTEMPT: attempt,
            logs.INDEX: str(index),
            heartbeat.FOLDER: str(self.run_dir.heartbeats),
        }
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
            raise ProcessError(f"{name}-{index} can't be started: {error}") from error
        deadline = time.monotonic() + self.launch.start_timeout_s if spec.announces else math.inf
        watchdog = Watchdog(self.run_dir.heartbeat_file(name, index), started.pid, self.launch)
        self._children[index] = _Member(index, attempt, started, deadline, watchdog)
        with contextlib.suppress(ProcessLookupError):  # it may have ended already: the pidfd will tell
            if spec.cpus:
                os.sched_setaffinity(started.pid, spec.cpus)

    def _notice_ready(self, child: _Member) -> None:
        if child.ready or not self.spec.announces:
            return
        info = self.run_dir.ready_info(self.spec.name, child.index)
        if info is None or info["pid"] != child.process.pid:  # of a process that an earlier launcher left dying
            return
        child.ready, child.deadline = True, math.inf
        try:
            _be_nice(child.process.pid, self.spec.nice)
        except OSError as error:  # slower, but right all the same
            self.log(f"{child.process.name} goes on without nice {self.spec.nice}: {error}")
        if self.on_ready is not None:
            self.on_ready(child.index, info)

    def _terminate(self, ending: list[_Member]) -> None:
        """SIGTERM to each process, SIGKILL after `launch.stop_timeout_s`; its group goes with it."""
        for child in ending:
            child.process.send(signal.SIGTERM)
        deadline = time.monotonic() + self.launch.stop_timeout_s
        left = {child.process.pidfd: child for child in ending}
        failure: BaseException | None = None  # of a listener or a log: raised once all have ended
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
        """Collect it, and end all that it has started. An attempt is of one role, and the processes of its that the
        launcher itself has started have ended."""
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
            (self.forward or self.log)(f"{name}: {logs.shortened(logs.plain(line, name))}")


@dataclass
class _Member:
    """One of the role's processes."""

    index: int
    attempt: str
    process: children.Child
    deadline: float  # monotonic; to be ready by
    watchdog: Watchdog
    ready: bool = False


def _be_nice(pid: int, nice: int) -> None:
    """Let other processes of the run go first. A kernel that groups processes by session heeds nice values within a
    session, and each process of a run has one of its own: then that of the group is what counts (man 7 sched). Raises
    OSError where the kernel refuses; with `nice` 0 nothing is asked of it."""
    if not nice:
        return
    group, deadline = Path(f"/proc/{pid}/autogroup"), time.monotonic() + _NICE_S
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended, or this kernel has no groups
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        while True:
            try:
                group.write_text(f"{nice}\n")
                return
            except BlockingIOError:  # who isn't root may set one every tenth of a second
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)
