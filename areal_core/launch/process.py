"""The child's side of process control: how a process of a run makes sure that it does not outlive the run.

Two independent ties to the parent, because each has a hole:

- PR_SET_PDEATHSIG: the kernel signals when the *thread* that spawned this process ends. It doesn't reach grandchildren.
- the lifeline: a pipe whose write end only the launcher holds. It reads end-of-file once the launcher is gone,
  however it went, and can be handed down to grandchildren (`lifeline_fds`), whatever session they live in.

A process that is stopped takes neither: `areal_core.launch.sweeper` ends that one. `areal_core.launch.children` is the
parent's side.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from areal_core.launch import heartbeat
from areal_core.storage.rundir import write_json

LIFELINE = "AREAL_LIFELINE"  # "<fd>:<inode>" of the pipe's read end; the inode tells it from a reused number
GRACE = "AREAL_GRACE_S"  # seconds between SIGTERM and SIGKILL once the launcher is gone
SPENT = 3  # exit status of a process whose own children have spent their restarts: not to be restarted
STACKS = signal.SIGUSR1  # has a process write the stacks of its threads into its log
HOPELESS = 4  # exit status of a process that ends on a bug of the user's: no restart and no other try would help
_PR_SET_PDEATHSIG = 1
_DEFAULT_GRACE_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def adopt(ready_file: Path | None = None) -> None:
    """Tie this process to its parent. Every process of a run calls it first, from its main thread.

    When the parent goes, this process gets SIGTERM (possibly twice: once for each tie) and, with a lifeline, SIGKILL
    AREAL_GRACE_S later. One that can't find the lifeline that it was given ends here, with SystemExit. `ready_file` is
    where `announce_ready` will write: what an earlier process left is removed. Its name is that of the heartbeat, which
    begins here.
    """
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    faulthandler.register(STACKS)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    die_with_parent(signal.SIGTERM)
    lifeline = lifeline_fds()
    if not lifeline and LIFELINE in os.environ:  # who held it was gone before it could be borrowed
        os.write(2, b"areal: the lifeline is gone, this process ends\n")
        raise SystemExit(128 + signal.SIGTERM)
    for fd in lifeline:
        threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()
    if ready_file is not None and heartbeat.FOLDER in os.environ:
        heartbeat.start(Path(os.environ[heartbeat.FOLDER]) / ready_file.stem)


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `signum` when the thread that spawned this process ends; enough for pool workers.

    A parent that goes during the call is noticed too, and in a process of multiprocessing one that was gone before.
    Raises OSError where the kernel refuses.
    """
    spawner = multiprocessing.parent_process()
    parent = os.getppid() if spawner is None else spawner.pid
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a process's main function and end with its exit status, without tearing the interpreter down.

    For processes that use torch. Its threads, gloo's and our daemon threads may still run native code at the end. One
    that then asks for an interpreter which is being torn down aborts the process. Exit functions run and streams are
    flushed; threads are not waited for.
    """
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - reported as at every other end
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        status = 1
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # the launcher's end of a stream is gone, or it is closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def boot_id() -> str:
    """Of this boot of the kernel: another one on every other machine, clones of this one among them."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def tie(lifeline: int, grace_s: float) -> dict[str, str]:
    """The environment by which a process that inherits this read end of a lifeline finds it."""
    return {LIFELINE: f"{lifeline}:{os.fstat(lifeline).st_ino}", GRACE: str(grace_s)}


def lifeline_fds() -> tuple[int, ...]:
    """The inherited lifeline, to be given to `subprocess.Popen(pass_fds=...)`; empty without a launcher.

    A parent that holds it and did not pass it on, such as torchrun's agent, lends it through /proc.
    """
    value = os.environ.get(LIFELINE)
    if value is None:
        return ()
    fd, inode = map(int, value.split(":"))
    with contextlib.suppress(OSError):  # closed on the way here: a process in between didn't pass it on
        if os.fstat(fd).st_ino == inode:
            return (fd,)
    try:  # the parent's end, opened again; every later look in this process and below finds it
        opened = os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        return ()
    os.set_blocking(opened, True)
    os.environ[LIFELINE] = f"{opened}:{inode}"
    return (opened,)


def announce_ready(path: Path | None, url: str | None = None) -> None:
    """Tell the launcher that this process is ready for work, and where it listens if it is a server."""
    if path is not None:
        heartbeat.ready()
        write_json(path, {"pid": os.getpid(), "url": url})


def _watch(fd: int) -> None:
    """Nothing is ever written into the lifeline: a read that returns means that the launcher is gone."""
    os.read(fd, 1)
    with contextlib.suppress(OSError):  # stderr may have gone with the launcher
        os.write(2, b"areal: the launcher is gone, this process ends\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(os.environ.get(GRACE, _DEFAULT_GRACE_S)))
    os.kill(os.getpid(), signal.SIGKILL)
