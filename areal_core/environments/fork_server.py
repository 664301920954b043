"""Judge untrusted answers in fresh forks of one warm, confined process.

    server = ForkServer("areal_core.environments.procedural_scores:Scores", cpu_s=1.0)
    server.ask(entry, answer) -> Reply("done", 1.0)

A scorer that interprets an answer (reasoning-gym's `eval`, SymPy's parser) may execute anything in the answer. So a
separate process imports the scorer and gives up its rights (`areal_core.environments.confinement`). Then it forks a
child for each answer. If a child changes the scorer, a cache or the gold answer, no other verdict changes. It may still
lie about its own answer, so scorers refuse answers other than plain expressions.

    python -m areal_core.environments.fork_server FD SETTINGS    # FD: an open pipe; the server ends when it is closed
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, cast

from areal_core.environments import confinement
from areal_core.errors import RewardError

_MEMORY = 2 * 2**30  # bytes of address space of one fork
_KNOWN, _KEPT = 4096, 4096  # number of cached replies; most characters of their answers
_REPLY = 2**16  # largest reply of a fork, in bytes
_START_TIMEOUT_S = 120.0  # for imports, on a busy machine
_WALL_FACTOR = 10  # wall-time limit of an answer, in units of its CPU limit, because the machine may be busy
_WALL_EXTRA_S = 5.0
# A fork can read this process's environment, so it must hold no secret. Huge pages halve the cost of a fork. The
# linker resolves all symbols before the first fork, so that no fork has to.
_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "LD_BIND_NOW": "1",
    "PYTHONMALLOC": "malloc",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
}
_READY = -1  # number of the first reply
_HUGE, _COLLAPSE, _COLLAPSE_EVERY = 2**21, 25, 256  # bytes of a page; MADV_COLLAPSE (Linux 6.1); answers
_libc = ctypes.CDLL(None)
_fork = ctypes.PyDLL(None).fork  # os.fork would also renew locks and random seeds: half of its cost
_PREPARE_TIMEOUT_S = 60.0  # for trusted work, such as creating a data set


class Scorer(Protocol):
    """The code that a fork server runs.
    The server creates it before confinement, so it must import everything first."""

    def prepare(self, task: Any) -> Any:
        """In the server: convert a trusted task (JSON) for `judge`.
        For `ForkServer.prepared` the result must be JSON."""
        ...

    def judge(self, prepared: Any, answer: str) -> Any:
        """In a fork: judge an answer. Returns JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of judging one answer.

    Only `done` has a value, which comes from a process that interpreted the answer. `died`, and a wall-time limit, are
    reported after a second fork ended the same way; CPU time does not depend on the machine's load. `failed` is the
    task's fault.
    """

    status: Literal["done", "raised", "timed_out", "stalled", "died", "failed"]
    value: Any = None


class ForkServer:
    """A process that judges answers one after the other, for any number of threads.

    It starts with the first answer. A failed process is ended, and the next answer starts a new one.
    """

    def __init__(self, scorer: str, *, cpu_s: float, prepare_cpu_s: float = 20.0, isolation: str = "confined") -> None:
        """`scorer` is the import path of a Scorer class.
        `cpu_s` limits the CPU seconds of one answer, and `prepare_cpu_s` those of its task. `isolation="none"` waives
        confinement."""
        self._wall_s = _WALL_FACTOR * cpu_s + _WALL_EXTRA_S
        limits = {"cpu_s": cpu_s, "prepare_cpu_s": prepare_cpu_s, "wall_s": self._wall_s}
        self._settings = json.dumps({"scorer": scorer, "confined": isolation != "none", **limits})
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._known = functools.lru_cache(_KNOWN)(self._reply)  # completions of a group often give the same answer
        self._pipe: Connection | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, task: Any, answer: str) -> Reply:
        """Judge an answer. Raises RewardError if the process ends, does not reply, or fails on the task."""
        reply = self._known if len(answer) <= _KEPT else self._reply
        return reply(json.dumps(task), answer)

    def prepared(self, task: Any) -> Any:
        """Return the scorer's prepared form of a task. Raises RewardError as `ask`."""
        with self._lock:
            return self._exchange(json.dumps(task), None).value

    def close(self) -> None:
        with self._lock:
            self._end()

    def _reply(self, task: str, answer: str) -> Reply:
        with self._lock:
            reply = self._exchange(task, answer)
            if reply.status in ("stalled", "died"):
                reply = self._exchange(task, answer)
        return replace(reply, status="timed_out") if reply.status == "stalled" else reply

    def _exchange(self, task: str, answer: str | None) -> Reply:
        number = next(self._numbers)
        try:
            pipe = self._pipe or self._started()
            pipe.send_bytes(json.dumps([number, task, answer]).encode())
            reply = self._receive(number, self._wall_s + _PREPARE_TIMEOUT_S)
        except (EOFError, OSError) as error:
            self._end()
            raise RewardError(f"the scoring process has exited: {error}") from error
        except BaseException:
            self._end()
            raise
        if reply.status == "failed":
            raise RewardError(f"the scorer failed on its own task: {reply.value}")
        return reply

    def _started(self) -> Connection:
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), self._settings],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT | {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            )
        self._receive(_READY, _START_TIMEOUT_S)
        return self._pipe

    def _end(self) -> None:
        """End the process, which holds no state. Its fork ends with it (PR_SET_PDEATHSIG)."""
        if self._pipe is not None and self.process is not None:
            self._pipe.close()
            self.process.kill()
            self.process.wait()
        self._pipe = self.process = None

    def _receive(self, expected: int, timeout_s: float) -> Reply:
        """Receive the reply with the number `expected`.
        Raises RewardError for another number, or after `timeout_s`."""
        assert self._pipe is not None
        if not self._pipe.poll(timeout_s):
            raise RewardError(f"the scoring process did not reply within {timeout_s:g} s")
        number, status, value = json.loads(self._pipe.recv_bytes())
        if number != expected:
            raise RewardError(f"the scoring process replied to request {number}, expected {expected}")
        return Reply(status, value)


# -- in the process ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """Fork a child for each answer until the other side closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a terminal's Ctrl-C; the closed pipe ends this process
    module, _, name = settings["scorer"].partition(":")
    scorer = cast(Scorer, getattr(importlib.import_module(module), name)())
    assert threading.active_count() == 1  # required by `_fork`
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    null, heap = os.open(os.devnull, os.O_RDWR), _heap()
    if settings["confined"]:
        confinement.confine()
    gc.freeze()  # exempt all existing objects from garbage collection
    _join_pages(heap)
    probe = cast(Scorer, SimpleNamespace(judge=lambda prepared, answer: True))
    if _judged(pipe, probe, None, "", null, settings) != ("done", True):
        raise OSError(
            "this machine can't confine a forked process"
        )  # otherwise each answer would seem to kill its fork
    pipe.send_bytes(json.dumps([_READY, "done", None]).encode())
    while True:
        try:
            number, task, answer = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if number % _COLLAPSE_EVERY == 0:
            _join_pages(heap)
        try:
            prepared = _prepared(scorer, json.loads(task), settings["prepare_cpu_s"])
        except Exception as error:  # noqa: BLE001 - the boundary: a data set may raise anything for its own task
            status, value = "failed", f"{type(error).__name__}: {error}"
        else:
            alone = answer is None
            status, value = ("done", prepared) if alone else _judged(pipe, scorer, prepared, answer, null, settings)
        try:
            pipe.send_bytes(json.dumps([number, status, value]).encode())
        except OSError:  # the client is gone
            return


def _heap() -> int:
    """Start address of the last part of the heap, which may have huge pages; 0 if the heap has no name."""
    parts = re.findall(r"(?m)^(\w+)-.*\[heap\]$", Path("/proc/self/maps").read_text())
    return int(parts[-1], 16) if parts else 0


def _join_pages(heap: int) -> None:
    """Rebuild the heap's huge pages.
    Writes beside a fork break them up, and a fork copies the table of small pages. Does nothing on kernels without
    MADV_COLLAPSE."""
    first = -(-heap // _HUGE) * _HUGE
    _libc.sbrk.restype = ctypes.c_void_p
    size = (_libc.sbrk(ctypes.c_long(0)) - first) // _HUGE * _HUGE
    if heap and size > 0:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _COLLAPSE)


def _prepared(scorer: Scorer, task: Any, cpu_s: float) -> Any:
    """Prepare a task. If it exceeds `cpu_s`, this process ends, because it could not continue."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return scorer.prepare(task)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _judged(
    pipe: Connection, scorer: Scorer, prepared: Any, answer: str, null: int, settings: dict[str, Any]
) -> tuple[str, Any]:
    """Judge one answer in a fork. Returns its status and value."""
    ours, theirs = os.pipe()
    server = os.getpid()
    if (child := _fork()) == 0:
        try:
            os.close(pipe.fileno())
            os.close(ours)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            _answer(theirs, scorer, prepared, answer, settings, server)
        finally:
            os._exit(1)
    os.close(theirs)
    ended = os.pidfd_open(child)
    said, complete = _read(ours, ended, pipe.fileno(), time.monotonic() + settings["wall_s"])
    os.kill(child, signal.SIGKILL)  # it has ended, or must end now
    _, status, used = os.wait4(child, 0)
    os.close(ours)
    os.close(ended)
    by_timer = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    if by_timer or used.ru_utime + used.ru_stime >= settings["cpu_s"]:
        return "timed_out", None
    if not complete:
        return ("stalled" if len(said) <= _REPLY else "died"), None
    if status:
        return "died", None
    try:
        [kind, value] = json.loads(said)
    except (ValueError, TypeError, RecursionError):  # no output, several outputs, or not a pair
        return "died", None
    if kind != "done":
        return "raised", None
    return ("done", value) if _plain(value) else ("died", None)


def _plain(value: Any) -> bool:
    """Whether a fork's value is a scalar or a list of scalars, which every reader can handle."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, str | int | float) for part in parts)


def _read(replies: int, ended: int, client: int, deadline: float) -> tuple[bytes, bool]:
    """Read a fork's output.
    Returns it, and whether the fork ended by the deadline without exceeding _REPLY bytes."""
    said, open_ = b"", [replies, ended]
    while len(said) <= _REPLY:
        ready, _, _ = select.select([*open_, client], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return said, False
        if client in ready:  # the client sends nothing before its reply, so it is gone
            os._exit(0)
        if replies in ready:
            more = os.read(replies, _REPLY)
            said += more
            if not more:
                open_.remove(replies)
        elif ended in ready:
            return said, True
    return said, False


def _answer(replies: int, scorer: Scorer, prepared: Any, answer: str, settings: dict[str, Any], server: int) -> None:
    """Judge in the fork. The kernel ends it when its CPU time is used up, even within one multiplication."""
    gc.disable()  # a collection would copy every page
    confinement.confine_fork(settings["cpu_s"], _MEMORY, confined=settings["confined"], server=server)
    try:
        value = scorer.judge(prepared, answer)
        plain = type(value) is float and 0.0 <= value <= 1.0  # json touches a quarter of all pages that a fork does
        said = f'["done", {value!r}]' if plain else json.dumps(["done", value])
    except BaseException:  # noqa: BLE001 - the boundary: an answer may raise anything, even SystemExit
        said = json.dumps(["raised", None])
    os.write(replies, said.encode())
    os._exit(0)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
