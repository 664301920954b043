"""The child's side of process control: how a process of a run makes sure that it does not outlive the run.

PR_SET_PDEATHSIG: the kernel sends SIGTERM when the *thread* that spawned this process ends, and so on down the tree. A
process that is stopped, hangs or did not ask for the signal is ended by `areal_core.launch.sweeper`.
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

SPENT = 3  # exit status of a process whose own children have spent their restarts: not to be restarted
STACKS = signal.SIGUSR1  # has a process write the stacks of its threads into its log
HOPELESS = 4  # exit status of a process that ends on a bug of the user's: no restart and no other try would help
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def adopt(ready_file: Path | None = None) -> None:
    """Tie this process to its parent. Every process of a run calls it first, from its main thread.

    When the parent goes, this process gets SIGTERM. `ready_file` is where `announce_ready` will write: what an earlier
    process left is removed. Its name is that of the heartbeat, which begins here.
    """
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    faulthandler.register(STACKS)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    die_with_parent(signal.SIGTERM)
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


def announce_ready(path: Path | None, url: str | None = None) -> None:
    """Tell the launcher that this process is ready for work, and where it listens if it is a server."""
    if path is not None:
        heartbeat.ready()
        write_json(path, {"pid": os.getpid(), "url": url})
