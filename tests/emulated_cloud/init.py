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
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.support import namespaces

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = pwd.getpwuid(0).pw_dir
ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8"}  # of everything that runs in a machine
_USER_DATA = Path("/var/lib/cloud/instance/scripts/part-001")
_REQUESTS = Path("/run/emulated-init")  # what `shutdown` writes into
FRESH = {"/tmp": "1777", "/var/tmp": "1777", "/run": "755", HOME: "700", "/var/lib/cloud": "755"}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
# What reaches beyond a namespace: modules, raw devices, to boot, the clock, new device nodes.
_NOT_ALLOWED = (16, 17, 22, 25, 27)
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_MS_RDONLY, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 4096, 16384, 1 << 18
_MNT_DETACH = 2

_SHUTDOWN = f"""#!/bin/sh
# The emulated cloud's: asks the first process, which may end all others before this one has.
trap '' TERM
when=+1
while [ $# -gt 0 ]; do
  case $1 in
    -P|-h|--poweroff) ;;
    -c) echo cancel > {_REQUESTS}; exit ;;
    now) when=+0; break ;;
    +[0-9]*) when=$1; break ;;
    *) echo "shutdown: an emulated machine takes -P, -c, now and +MINUTES, not $1" >&2; exit 1 ;;
  esac
  shift
done
echo "off ${{when#+}}" > {_REQUESTS}
"""
_POWER_OFF = "#!/bin/sh\nexec /usr/local/sbin/shutdown -P now\n"

_libc = ctypes.CDLL(None, use_errno=True)


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
    minute_s: float  # how long a minute of `shutdown` is
    power_off_s: float  # what processes have between SIGTERM and SIGKILL when it is powered off
    up: int  # file descriptor, written to once the machine is one


def main() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")
    machine = Machine(**json.load(sys.stdin))  # fails where who would have sent it has gone before
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    namespaces.enter(machine.namespace)
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC), "unshare")
    socket.sethostname(machine.hostname)
    _file_system(machine)
    _files(machine)
    for capability in _NOT_ALLOWED:
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl")
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    first = _Init(machine)
    os.write(machine.up, b"\n")
    os.close(machine.up)
    first.live()


def _file_system(machine: Machine) -> None:
    """This host's, read alone, below one that takes what is written and ends with the machine."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", machine.folder, "tmpfs", options="mode=755")
    os.chdir(machine.folder)
    os.mkdir("root")
    root = Path(machine.folder, "root")
    _overlay("/", root)
    for path, mode in FRESH.items():
        _fresh(root, path, mode)
    for path in machine.kept:
        _overlay(path, root / path.lstrip("/"))
    for path in machine.hidden:
        if (root / path.lstrip("/")).is_dir():
            _fresh(root, path, "755")
    _mount("proc", root / "proc", "proc")
    _mount("sysfs", root / "sys", "sysfs", _MS_RDONLY)
    _devices(root)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _overlay(lower: str, target: Path) -> None:
    """`lower` at `target`; what is written goes into folders in the working folder."""
    target.mkdir(parents=True, exist_ok=True)
    number = len(os.listdir())
    upper, work = f"upper-{number}", f"work-{number}"
    os.mkdir(upper)
    os.mkdir(work)
    for special in ("\\", ",", ":"):
        lower = lower.replace(special, f"\\{special}")
    _mount("overlay", target, "overlay", options=f"lowerdir={lower},upperdir={upper},workdir={work}")


def _fresh(root: Path, path: str, mode: str) -> None:
    place = root / path.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", place, "tmpfs", options=f"mode={mode}")


def _devices(root: Path) -> None:
    _mount("tmpfs", root / "dev", "tmpfs", options="mode=755")
    for name in _DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, None, _MS_BIND)
    for name, kind, options in (
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"),
        ("shm", "tmpfs", "mode=1777"),
    ):
        (root / "dev" / name).mkdir()
        _mount(kind, root / "dev" / name, kind, options=options)
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (root / "dev" / name).symlink_to(target)
    (root / "dev" / "stderr").symlink_to("fd/2")


def _files(machine: Machine) -> None:
    _write("/etc/hostname", f"{machine.hostname}\n")
    _write("/etc/hosts", f"127.0.0.1 localhost\n{machine.address} {machine.hostname}.ec2.internal {machine.hostname}\n")
    _write("/etc/resolv.conf", "")  # nobody knows other names
    _write(f"{HOME}/.aws/config", f"[default]\nendpoint_url = {machine.endpoint}\n")
    for folder in dict.fromkeys(("/usr/local/sbin", os.path.realpath("/sbin"))):
        _write(f"{folder}/shutdown", _SHUTDOWN, 0o755)
        _write(f"{folder}/poweroff", _POWER_OFF, 0o755)
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
        self._user_data: int | None = None  # its process
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
        if not user_data.startswith("#!"):
            _say("the user data is no script, and nothing is run")
            return
        _write(str(_USER_DATA), user_data, 0o700)
        try:
            self._user_data = os.posix_spawn(
                _USER_DATA,
                [str(_USER_DATA)],
                ENVIRONMENT,
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT),
            )
        except OSError as error:
            _say(f"the user data does not run: {error}")

    def _wait(self, until: float | None) -> bytes:
        """Wait for whatever comes, at most until then, and take it up; returns the numbers of signals."""
        left = None if until is None else max(until - time.monotonic(), 0)
        ready, _, _ = select.select([self._signals, self._requests], [], [], left)
        if self._requests in ready:
            for request in os.read(self._requests, 2**16).decode().splitlines():
                self._take(request)
        came = os.read(self._signals, 2**16) if self._signals in ready else b""
        self._collect()
        return came

    def _take(self, request: str) -> None:
        match request.split():
            case ["off", minutes] if minutes.isdecimal():
                self._off_at = time.monotonic() + int(minutes) * self._machine.minute_s
                _say(f"powers off in {minutes} minutes")
            case ["cancel"]:
                self._off_at = None
                _say("does not power off")
            case _:
                _say(f"does not understand {request!r}")

    def _collect(self) -> bool:
        """What has ended; returns whether anything is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._user_data:
                    _say(f"the user data has ended with status {os.waitstatus_to_exitcode(ended[1])}")
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


def _mount(source: str, target: str | Path, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    coded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(coded[0], coded[1], coded[2], ctypes.c_ulong(flags), coded[3]), f"mount {target}")


def _check(failed: int, what: str) -> None:
    if failed:
        raise OSError(code := ctypes.get_errno(), f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
