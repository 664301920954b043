"""Confine a process that interprets completions: no files, network, programs or other processes.

    confine()                     # a fork server, once it has imported everything
    confine_fork(1.0, ...)        # each of its forks

The kernel enforces this; nothing has to be installed. The server loses all capabilities. It may read only the folders
of Python and its packages (Landlock, Linux 5.13). A fork may compute and write to open files (seccomp), within limits
of CPU time and memory. No process can undo it.

    syscall_filter() -> bytes for `bwrap --seccomp`, the filter of a sandbox (classic BPF)

The filter refuses calls that ordinary programs do not need and that have had kernel vulnerabilities. They concern
tracing, other processes' memory, mounts, namespaces, keys, BPF, io_uring, modules and clocks. It also refuses memory
other than mappings, and sockets that namespaces don't separate (AF_VSOCK, AF_ALG). Numbers are those of x86-64, from
the kernel's syscall_64.tbl.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal_core.errors import ConfigError

_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000  # set in the call numbers of the x32 table
_NR, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data; the low half of an argument comes first
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSED = 0x00050000  # with an errno

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS, CGROUP, UTS, IPC, USER, PID, NET}
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SOCKET, _IOCTL, _CLONE, _CLONE3 = 41, 16, 56, 435

REFUSED = {
    "shmget": 29, "ptrace": 101, "syslog": 103, "uselib": 134, "personality": 135, "ustat": 136, "vhangup": 153,
    "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212, "clock_settime": 227,
    "mbind": 237, "set_mempolicy": 238, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447, "open_tree_attr": 467,
}  # fmt: skip


# All calls allowed to a fork that judges an answer: compute, allocate, import, write to open files, end. Landlock
# decides which files it may open. fcntl and ioctl are not allowed: they send signals, take leases, change flags.
COMPUTING = {
    "stat": 4, "lstat": 6, "pread64": 17, "access": 21, "getcwd": 79, "readlink": 89,
    "getdents64": 217, "openat": 257, "newfstatat": 262, "statx": 332,
    "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25, "madvise": 28,
    "getpid": 39, "exit": 60, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "clock_gettime": 228, "clock_getres": 229, "exit_group": 231,
    "set_robust_list": 273, "getrandom": 318, "membarrier": 324, "rseq": 334,
}  # fmt: skip


def allowing(allowed: Mapping[str, int]) -> bytes:
    """Build a filter that refuses all other calls with EPERM. A wrong architecture kills the process."""
    return b"".join([*_PREFIX, *_returning(_ALLOW, allowed.values()), _op(_RETURN, _REFUSED | errno.EPERM)])


@functools.cache
def syscall_filter() -> bytes:
    """Build the sandbox's filter.
    Refused calls return EPERM; a wrong architecture kills the process. A filter can't see the flags of clone3. It
    returns ENOSYS, as on older kernels, and C libraries then call clone."""
    refuse, absent = _REFUSED | errno.EPERM, _REFUSED | errno.ENOSYS
    program = [*_PREFIX, *_returning(refuse, REFUSED.values()), *_returning(absent, [_CLONE3])]
    program += _on(_SOCKET, 0, [_op(_EQUAL, _AF_UNIX, yes=1), _op(_RETURN, refuse)])
    program += _on(_CLONE, 0, [_op(_ANY_BIT, _NEW_NAMESPACES, no=1), _op(_RETURN, refuse)])
    for terminal in (_TIOCSTI, _TIOCLINUX):
        program += _on(_IOCTL, 1, [_op(_EQUAL, terminal, no=1), _op(_RETURN, refuse)])
    return b"".join([*program, _op(_RETURN, _ALLOW)])


def _returning(result: int, calls: Iterable[int]) -> list[bytes]:
    """Instructions that return `result` for each of the calls."""
    return [step for call in calls for step in (_op(_EQUAL, call, no=1), _op(_RETURN, result))]


def _on(number: int, argument: int, then: list[bytes]) -> list[bytes]:
    """Instructions for one call, with one of its arguments loaded; reloads the call number behind them."""
    body = [_op(_LOAD, _ARGS + 8 * argument), *then, _op(_LOAD, _NR)]
    return [_op(_EQUAL, number, no=len(body)), *body]


def _op(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Encode a struct sock_filter. A comparison skips the next `yes` or `no` instructions."""
    return struct.pack("=HBBI", code, yes, no, value)


_PREFIX = (  # beginning of every filter; then the call number is loaded
    _op(_LOAD, _ARCH), _op(_EQUAL, _ARCHITECTURE, yes=1), _op(_RETURN, _KILL),
    _op(_LOAD, _NR), _op(_AT_LEAST, _X32, no=1), _op(_RETURN, _KILL),
)  # fmt: skip


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, x86-64
_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = (13, 14, 15, 15, 16)  # number of file rights that Landlock knows, by its version, starting at 1
_TCP, _SCOPES = 3, 3  # bind and connect, since version 4; abstract sockets and signals, since version 6
_PDEATHSIG, _DUMPABLE, _SECCOMP, _BOUNDING_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_FILTER = 2
_CAPABILITIES = 64
_CAPABILITY_VERSION_3 = 0x20080522
_FORK_FILTER = allowing(COMPUTING)
_INSTRUCTIONS = ctypes.create_string_buffer(_FORK_FILTER, len(_FORK_FILTER))
_FORK_PROGRAM = ctypes.c_char_p(struct.pack("@HP", len(_FORK_FILTER) // 8, ctypes.addressof(_INSTRUCTIONS)))

_libc = ctypes.CDLL(None, use_errno=True)


def check(isolation: str) -> None:
    """Raise ConfigError if environment.sandbox asks for a confinement that this kernel lacks."""
    if isolation != "none" and (platform.machine() != "x86_64" or _landlock_version() < 1):
        raise ConfigError(
            "environment.sandbox: can't confine verifiers: this kernel has no Landlock (Linux 5.13 or newer, x86-64); "
            "set environment.sandbox=none to run them without isolation"
        )


def confine() -> None:
    """Confine a server and all its forks. Raises OSError if the kernel refuses."""
    _prctl(_DUMPABLE, 0)  # closes its memory to other processes of this user
    _prctl(_NO_NEW_PRIVS, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for capability in range(_CAPABILITIES):
        _libc.prctl(_BOUNDING_DROP, capability, 0, 0, 0)  # fails without privileges, when there are none to drop
    _called(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)))
    _read_only()


def confine_fork(cpu_s: float, memory_bytes: int, *, confined: bool, server: int) -> None:
    """Limit this fork: CPU seconds, memory, and, if `confined`, system calls.
    The fork ends with its server."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server ended before this fork asked for the signal
        os._exit(1)
    seconds = int(cpu_s) + 1  # holds even if the fork changes its timer
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if confined:
        _called(_libc.prctl(_SECCOMP, _FILTER, _FORK_PROGRAM, 0, 0))


@functools.cache
def _landlock_version() -> int:
    """Landlock's version; less than 1 if the kernel has none."""
    return _libc.syscall(_CREATE_RULESET, None, 0, _VERSION)


def _read_only() -> None:
    """Allow with Landlock only to read files in the folders of code."""
    version = _landlock_version()
    rights = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]) - 1
    handled = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    described = struct.pack(f"={len(handled)}Q", *handled)
    rules = _called(_libc.syscall(_CREATE_RULESET, described, len(described), 0))
    package = Path(__file__).parents[1]  # the checkout, if the installation is editable
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
