"""Network namespaces as hosts: a cable each to a switch, what runs in them, and their end, also after test processes
that were killed. Names are `areal-PID-...`: once there is no process PID, any other may sweep them away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path

from tests.support import processes

PREFIX = "areal"
TIMEOUT_S = 300.0  # for whatever a test waits for; what fails to come fails there
_NAMED = Path("/run/netns")
_CLONE_NEWNET, _CLONE_NEWPID = 0x40000000, 0x20000000

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """What this machine lacks for namespaces, on one line; None if nothing."""
    if shutil.which("ip") is None:
        return "needs the command ip: apt install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        ip("netns", "add", probe)
        ip("-n", probe, "link", "add", "name", "one", "type", "veth", "peer", "name", "other")
        ip("-n", probe, "link", "add", "name", "three", "type", "bridge")
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())
        return f"needs CAP_SYS_ADMIN and CAP_NET_ADMIN, for namespaces with veth and bridge: {reason}"
    finally:
        delete(probe)
    return None


class Switch:
    """A namespace with a bridge, which hosts are plugged in at. A port's name is up to 12 characters."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "add", "name", "bridge", "type", "bridge")
        ip("-n", namespace, "link", "set", "dev", "bridge", "up")

    def plug_in(self, host: str, port: str, address: str, prefix: int) -> None:
        """Make the namespace `host`, with its loopback and one card. The card's own number follows from the address, so
        that whoever gets an address after another host is reached at once."""
        number = "02:00:" + IPv4Address(address).packed.hex(":")
        ip("netns", "add", host)
        ip(
            *("-n", self.namespace, "link", "add", "name", _end(port)),
            *("type", "veth", "peer", "name", "eth0", "address", number, "netns", host),
        )
        ip("-n", self.namespace, "link", "set", "dev", _end(port), "master", "bridge", "up")
        ip("-n", host, "address", "add", f"{address}/{prefix}", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", host, "link", "set", "dev", device, "up")

    def cut(self, port: str) -> None:
        """Nothing reaches this host or comes from it any more."""
        ip("-n", self.namespace, "link", "set", "dev", _end(port), "down")

    def join(self, port: str) -> None:
        ip("-n", self.namespace, "link", "set", "dev", _end(port), "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def delete(namespace: str) -> None:
    """Give up its name; it ends with the last process in it. None of this name is fine."""
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Move the calling thread; what it starts from then on, processes and threads, is there too. Raises OSError."""
    with (_NAMED / namespace).open() as there:
        _set(there.fileno())


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """The calling thread is there for the length of this context. Raises OSError."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _set(before.fileno())


@contextmanager
def new_pids() -> Iterator[None]:
    """What the calling thread starts in this context, a single process, is the first of a PID namespace: all that it
    leaves ends with it. No thread may be started meanwhile. Raises OSError."""
    with open("/proc/self/ns/pid") as own:
        if _libc.unshare(_CLONE_NEWPID):
            raise OSError(code := ctypes.get_errno(), f"unshare: {os.strerror(code)}")
        try:
            yield
        finally:
            _set(own.fileno(), _CLONE_NEWPID)


def pids(namespace: str) -> list[int]:
    """Everything that runs there, this process included if it does."""
    found: list[int] = []
    with suppress(FileNotFoundError):  # there is no such namespace
        asked = (_NAMED / namespace).stat()
        for process in processes.entries():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it ends
                if os.path.samestat((process / "ns" / "net").stat(), asked):
                    found.append(int(process.name))
    return found


def kill_all(namespace: str, but: Sequence[int] = ()) -> None:
    processes.kill_all(lambda: [pid for pid in pids(namespace) if pid not in but])


def end(own: str, but: Sequence[int] = ()) -> None:
    """All namespaces whose names begin with `own`, and what runs there but for `but` and this process."""
    for entry in _NAMED.glob(f"{own}-*"):
        kill_all(entry.name, (*but, os.getpid()))
        delete(entry.name)


def sweep() -> None:
    """Namespaces of processes that were killed, and what still runs there; those of live processes stay."""
    for entry in _NAMED.glob(f"{PREFIX}-*-*"):
        _, pid, _ = entry.name.split("-", 2)
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            kill_all(entry.name)
            delete(entry.name)


def _end(port: str) -> str:
    """The switch's end of a host's cable."""
    return f"to-{port}"


def _set(descriptor: int, kind: int = _CLONE_NEWNET) -> None:
    if _libc.setns(descriptor, kind):
        raise OSError(code := ctypes.get_errno(), f"setns: {os.strerror(code)}")
