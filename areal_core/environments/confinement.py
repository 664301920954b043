"""Confine a process of our own that runs what a completion says: no files, network, programs or other processes.

    confine()                     # a server of forks, once it has imported everything
    confine_fork(1.0, ...)        # each of its forks

Nothing has to be installed: the kernel does it. The server loses all capabilities and may only read where Python and
its packages lie (Landlock, Linux 5.13). A fork may compute, and write to what is open (seccomp), within limits of CPU
time and memory. No process can undo it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path

from areal_core.environments.seccomp import COMPUTING, allowing
from areal_core.errors import ConfigError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, x86-64
_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = (13, 14, 15, 15, 16)  # how many rights to files Landlock knows, by its version, from 1 on
_TCP, _SCOPES = 3, 3  # bind and connect, from version 4 on; abstract sockets and signals, from version 6 on
_PDEATHSIG, _DUMPABLE, _SECCOMP, _BOUNDING_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_FILTER = 2
_CAPABILITIES = 64
_CAPABILITY_VERSION_3 = 0x20080522
_FORK_FILTER = allowing(COMPUTING)
_INSTRUCTIONS = ctypes.create_string_buffer(_FORK_FILTER, len(_FORK_FILTER))
_FORK_PROGRAM = ctypes.c_char_p(struct.pack("@HP", len(_FORK_FILTER) // 8, ctypes.addressof(_INSTRUCTIONS)))

_libc = ctypes.CDLL(None, use_errno=True)


def check(isolation: str) -> None:
    """Raise ConfigError where environment.sandbox asks for a confinement that this kernel does not have."""
    if isolation != "none" and (platform.machine() != "x86_64" or _landlock_version() < 1):
        raise ConfigError(
            "environment.sandbox: this kernel can't confine verifiers, it has no Landlock (Linux 5.13, x86-64); "
            "environment.sandbox=none waives isolation"
        )


def confine() -> None:
    """Confine a server, and all that it forks. Raises OSError where the kernel refuses."""
    _prctl(_DUMPABLE, 0)  # its memory is closed to other processes of this user
    _prctl(_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for capability in range(_CAPABILITIES):
        _libc.prctl(_BOUNDING_DROP, capability, 0, 0, 0)  # who may not drop them has none
    _called(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)))
    _read_only()


def confine_fork(cpu_s: float, memory_bytes: int, *, confined: bool, server: int) -> None:
    """Limit this fork, whose CPU time counts from 0; unless `confined`, nothing but that. It ends with its server."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before this fork asked for the signal
        os._exit(1)
    seconds = int(cpu_s) + 1  # whatever it does to its timer
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if confined:
        _called(_libc.prctl(_SECCOMP, _FILTER, _FORK_PROGRAM, 0, 0))


@functools.cache
def _landlock_version() -> int:
    """Less than 1: there is none."""
    return _libc.syscall(_CREATE_RULESET, None, 0, _VERSION)


def _read_only() -> None:
    """Landlock: read files where code lies, do nothing else with any file."""
    version = _landlock_version()
    rights = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]) - 1
    handled = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    described = struct.pack(f"={len(handled)}Q", *handled)
    rules = _called(_libc.syscall(_CREATE_RULESET, described, len(described), 0))
    package = Path(__file__).parents[1]  # in the checkout, where the installation is editable
    for place in {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", str(package)}:
        if os.path.isdir(place):
            folder = os.open(place, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, folder)
            _called(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
            os.close(folder)
    _called(_libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _prctl(option: int, value: int) -> None:
    _called(_libc.prctl(option, value, 0, 0, 0))


def _called(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
