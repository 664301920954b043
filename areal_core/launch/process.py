"""Process control on the child's side: a process of a run makes sure that it does not outlive the run.

PR_SET_PDEATHSIG: the kernel sends SIGTERM when the *thread* that spawned this process ends, and so on down the tree.
`areal_core.launch.sweeper` ends processes that are stopped, hang or did not ask for the signal.
`areal_core.launch.children` is the parent's side.
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
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from areal_core.launch import heartbeat
from areal_core.storage.rundir import write_json

EXIT_FINAL = 3  # exit status: its own children have spent their restarts; do not restart it
STACKS = signal.SIGUSR1  # makes a process write its threads' stacks to its log
EXIT_USER_CODE = 4  # exit status: a bug in user code; no restart or retry would help
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def tie_to_parent(ready_file: Path | None = None) -> None:
    """Tie this process to its parent. Every process of a run calls this first, from its main thread.

    When the parent ends, this process gets SIGTERM. `announce_ready` will write `ready_file`, and an earlier process's
    file is removed. The heartbeat file has the same name, and the heartbeat starts here.
    """
    faulthandler.enable()  # a crash in native code writes its stack to the log
    faulthandler.register(STACKS)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    die_with_parent(signal.SIGTERM)
    if ready_file is not None and heartbeat.FOLDER in os.environ:
        heartbeat.start(Path(os.environ[heartbeat.FOLDER]) / ready_file.stem)


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send `signum` when the thread that spawned this process ends.

    This suffices for pool workers. It also notices a parent that ends during the call. In a process of multiprocessing
    it also notices a parent that ended earlier. Raises OSError if the kernel refuses.
    """
    spawner = multiprocessing.parent_process()
    parent = os.getppid() if spawner is None else spawner.pid
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def run_and_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run a process's main function and exit with its status, without interpreter shutdown.

    For processes that use torch. Its threads, gloo's and our daemon threads may still run native code at the end. Such
    a thread aborts the process if it asks for the interpreter during shutdown. Exit functions run and streams are
    flushed. Threads are not joined.
    """
    try:
        status = main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - reported as at every other end
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        status = 1
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # the launcher's end of a stream is gone or closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def boot_id() -> str:
    """Identifier of this boot of the kernel; differs on every other machine, including clones of this one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def announce_ready(path: Path | None, url: str | None = None) -> None:
    """Tell the launcher that this process is ready, and its URL if it is a server."""
    if path is not None:
        heartbeat.ready()
        write_json(path, {"pid": os.getpid(), "url": url})
