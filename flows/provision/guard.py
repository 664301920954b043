"""Run a program until its deadline: `python -I -S guard.py RIGHT GRACE_S PROGRAM [ARGUMENT ...]`.

RIGHT is the file descriptor of a pipe's read end. Each line read from it is a deadline in seconds of CLOCK_BOOTTIME and
replaces the previous one. GRACE_S before the deadline the program gets SIGTERM. At the deadline the program's process
group is killed. If the write end of the pipe closes, the parent is gone, and the program gets SIGTERM at once. This
process passes SIGINT and SIGTERM on, and ends with the program's exit status.

A parent may pass the last descriptor of a lock (`pass_fds`). The lock is then held until the program has ended.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_MAX_WAIT_S = 1.0  # longest wait: select's clock stops while the machine sleeps, the deadline's clock does not


def main() -> int:
    right, grace_s, argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)  # the wake-up pipe delivers them
    try:
        program = _start(argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    end, asked = float("inf"), False
    sources = [right, wake_read]
    while True:
        due = end if asked else end - grace_s
        wait_s = None if due == float("inf") else min(max(0.0, due - _now()), _MAX_WAIT_S)
        ready = select.select(sources, [], [], wait_s)[0]
        if wake_read in ready:
            for signum in os.read(wake_read, 64):
                if signum != signal.SIGCHLD:
                    program.send_signal(signum)
        if right in ready:
            if lines := os.read(right, 65536).split():  # each line was one write, so no line is cut
                end = float(lines[-1])
            else:
                sources.remove(right)
        if not asked and (right not in sources or _now() >= end - grace_s):
            program.terminate()
            asked = True
        if _now() >= end:
            _kill(program)
            end = float("inf")
        if (code := program.poll()) is not None:
            _kill(program)  # provider processes outlive a killed terraform
            return _as(code)


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    """Start the program. The kernel sends it SIGTERM if this process is killed."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(argv, preexec_fn=tie, process_group=0)


def _kill(program: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _as(code: int) -> int:
    """The exit status of the program; if a signal ended the program, die of the same signal."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
