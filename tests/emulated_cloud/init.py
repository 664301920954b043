"""The first process of a machine: makes it, runs its user data, collects what ends, and powers it off.

Started in a PID namespace of its own, with a `Machine` as JSON on its standard input. Whatever runs in the machine ends
with it. Exit status 0: the machine was powered off, from inside (`shutdown`) or by SIGTERM. Python without its
site-packages: it stays for as long as the machine does.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.support import namespaces

HOME = pwd.getpwuid(0).pw_dir
ENVIRONMENT = {  # of everything that runs in a machine
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "LANG": "C.UTF-8",
}
_USER_DATA = "/var/lib/cloud/instance/scripts/part-001"
_REQUESTS = Path("/run/emulated-init")  # what `shutdown` writes into
FRESH = {"/tmp": "1777", "/var/tmp": "1777", "/run": "755", HOME: "700", "/var/lib/cloud": "755"}

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000

_SHUTDOWN = f"""#!/bin/sh
# The emulated cloud's: asks the first process, which may end all others before this one has.
trap '' TERM
when=+1
for word; do
  case $word in
    now) when=+0 ;;
    +[0-9]*) when=$word ;;
  esac
done
echo "${{when#+}}" > {_REQUESTS}
"""


class Machine(NamedTuple):
    """What a machine is made with."""

    namespace: str  # its network
    address: str
    hostname: str
    folder: str  # where its file system is put together; nothing is left there
    kept: list[str]  # folders of this host that are not of its root file system, or in what is fresh
    hidden: list[str]  # folders that are empty there
    endpoint: str  # of the cloud's API
    user_data: str | None  # none: nothing is run
    power_off_s: float  # what processes have between SIGTERM and SIGKILL when it is powered off
    up: int  # file descriptor, written to once the machine is one


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    machine = Machine(**json.load(sys.stdin))  # fails where who would have sent it has gone before
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    namespaces.enter(machine.namespace)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC):
        raise OSError(code := ctypes.get_errno(), f"unshare: {os.strerror(code)}")
    socket.sethostname(machine.hostname)
    _file_system(machine)
    _files(machine)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    first = _Init(machine)
    os.write(machine.up, b"\n")
    os.close(machine.up)
    first.live()


def _file_system(machine: Machine) -> None:
    """This host's, read alone, below one that takes what is written and ends with the machine."""
    _do("mount", "--make-rprivate", "/")
    _do("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", machine.folder)
    os.chdir(machine.folder)
    root = Path(machine.folder, "root")
    _overlay("/", root)
    for path, mode in FRESH.items():
        _fresh(root, path, mode)
    for path in machine.kept:
        _overlay(path, root / path.lstrip("/"))
    for path in machine.hidden:
        if (root / path.lstrip("/")).is_dir():
            _fresh(root, path, "755")
    _do("mount", "-t", "proc", "proc", root / "proc")
    _do("mount", "-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    _do("mount", "--rbind", "/dev", root / "dev")
    _fresh(root, "/dev/shm", "1777")
    os.chdir(root)
    _do("pivot_root", ".", ".")
    _do("umount", "--lazy", ".")
    os.chdir("/")


def _overlay(lower: str, target: Path) -> None:
    """`lower` at `target`; what is written goes into folders in the working folder."""
    target.mkdir(parents=True, exist_ok=True)
    upper, work = (f"{kind}-{len(os.listdir())}" for kind in ("upper", "work"))
    os.mkdir(upper)
    os.mkdir(work)
    _do("mount", "-t", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", "overlay", target)


def _fresh(root: Path, path: str, mode: str) -> None:
    place = root / path.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    _do("mount", "-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", place)


def _do(*argv: object) -> None:
    subprocess.run([str(each) for each in argv], check=True)


def _files(machine: Machine) -> None:
    _write("/etc/hosts", f"127.0.0.1 localhost\n{machine.address} {machine.hostname}\n")
    _write("/etc/resolv.conf", "")  # nobody knows other names
    _write(f"{HOME}/.aws/config", f"[default]\nendpoint_url = {machine.endpoint}\n")
    for folder in dict.fromkeys(("/usr/local/sbin", os.path.realpath("/sbin"))):
        _write(f"{folder}/shutdown", _SHUTDOWN, 0o755)
    os.mkfifo(_REQUESTS, 0o600)


def _write(path: str, text: str, mode: int = 0o644) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # it may be a link
    file.write_text(text)
    file.chmod(mode)


class _Init:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._off_at: float | None = None  # on the monotonic clock
        self._requests = os.open(_REQUESTS, os.O_RDWR | os.O_NONBLOCK)  # also for writing: no end of file ever comes
        self._signals, told = os.pipe()
        for end in (self._signals, told):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(told)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, lambda *_: None)

    def live(self) -> None:
        """Until the machine is powered off."""
        if self._machine.user_data is not None:
            self._start(self._machine.user_data)
        while self._off_at is None or self._off_at > time.monotonic():
            if signal.SIGTERM in self._wait(self._off_at):
                break
        self._power_off()

    def _start(self, user_data: str) -> None:
        _write(_USER_DATA, user_data, 0o700)
        defaults = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
        os.posix_spawn(_USER_DATA, [_USER_DATA], ENVIRONMENT, setsid=True, setsigmask=(), setsigdef=defaults)

    def _wait(self, until: float | None) -> bytes:
        """Wait for whatever comes, at most until then, and take it up; returns the numbers of signals."""
        left = None if until is None else max(until - time.monotonic(), 0)
        ready, _, _ = select.select([self._signals, self._requests], [], [], left)
        if self._requests in ready:
            minutes = os.read(self._requests, 2**16).split()[-1].decode()
            self._off_at = time.monotonic() + 60.0 * int(minutes)
            _say(f"powers off in {minutes} minutes")
        came = os.read(self._signals, 2**16) if self._signals in ready else b""
        self._collect()
        return came

    def _collect(self) -> bool:
        """What has ended; returns whether anything is left."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True

    def _power_off(self) -> None:
        _say("powers off")
        try:
            os.kill(-1, signal.SIGTERM)
        except ProcessLookupError:  # nothing else runs
            return
        deadline = time.monotonic() + self._machine.power_off_s
        while self._collect() and time.monotonic() < deadline:
            self._wait(deadline)


def _say(text: str) -> None:
    print(f"emulated cloud: {text}", flush=True)


if __name__ == "__main__":
    main()
