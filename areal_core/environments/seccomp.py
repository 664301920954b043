"""The system calls that an untrusted program is refused, as a filter that the kernel runs (seccomp, classic BPF).

    syscall_filter() -> bytes for `bwrap --seccomp`, or for prctl in a process of our own (`confinement`)

What is left out is what a program that reads, computes and writes has no use for and kernels have had holes in: tracing
and other processes' memory, mounts, namespaces, keys, BPF, io_uring, modules, clocks, memory beside what it maps, and
sockets that namespaces don't separate (AF_VSOCK, AF_ALG). Numbers are those of x86-64, from the kernel's
syscall_64.tbl.
"""

from __future__ import annotations

import errno
import functools
import struct
from collections.abc import Mapping

_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000  # set in the numbers of another table of calls
_NR, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data; low half of an argument first
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


# All that a fork which judges an answer may call (`confinement`): compute, allocate, import, write to open files, end.
# Which files it may open is for Landlock to say. Not fcntl and ioctl: they send signals, take leases, change flags.
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
    """A filter that refuses all calls but these, with EPERM. A wrong architecture kills."""
    numbers = set(allowed.values())
    edges = sorted(n for n in numbers | {n + 1 for n in numbers} if (n in numbers) != (n - 1 in numbers))
    return b"".join([*_PREFIX, *_between(edges, _REFUSED | errno.EPERM, _ALLOW)])


def _between(edges: list[int], before: int, after: int) -> list[bytes]:
    """Binary search of a call's number: `before` the first edge, `after` it, and so on in turn. It is short as the
    kernel runs it for every call there is when a process installs it."""
    if not edges:
        return [_op(_RETURN, before)]
    middle = len(edges) // 2
    low = _between(edges[:middle], before, after)
    high = _between(edges[middle + 1 :], *((before, after) if middle % 2 else (after, before)))
    return [_op(_AT_LEAST, edges[middle], yes=len(low)), *low, *high]


@functools.cache
def syscall_filter() -> bytes:
    """A wrong architecture kills; what is refused returns EPERM. clone3, whose flags are out of a filter's reach, does
    as on kernels that lack it, and C libraries call clone."""
    refuse, absent = _REFUSED | errno.EPERM, _REFUSED | errno.ENOSYS
    program = [*_PREFIX]
    for number in REFUSED.values():
        program += [_op(_EQUAL, number, no=1), _op(_RETURN, refuse)]
    program += [_op(_EQUAL, _CLONE3, no=1), _op(_RETURN, absent)]
    program += _on(_SOCKET, 0, [_op(_EQUAL, _AF_UNIX, yes=1), _op(_RETURN, refuse)])
    program += _on(_CLONE, 0, [_op(_ANY_BIT, _NEW_NAMESPACES, no=1), _op(_RETURN, refuse)])
    for terminal in (_TIOCSTI, _TIOCLINUX):
        program += _on(_IOCTL, 1, [_op(_EQUAL, terminal, no=1), _op(_RETURN, refuse)])
    return b"".join([*program, _op(_RETURN, _ALLOW)])


def _on(number: int, argument: int, then: list[bytes]) -> list[bytes]:
    """Instructions for one call, after its argument is loaded; the number is loaded again behind them."""
    body = [_op(_LOAD, _ARGS + 8 * argument), *then, _op(_LOAD, _NR)]
    return [_op(_EQUAL, number, no=len(body)), *body]


def _op(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """A struct sock_filter: what follows is skipped by `yes` or `no` instructions, as a comparison turns out."""
    return struct.pack("=HBBI", code, yes, no, value)


_PREFIX = (  # what every filter begins with: the number of the call is loaded after it
    _op(_LOAD, _ARCH), _op(_EQUAL, _ARCHITECTURE, yes=1), _op(_RETURN, _KILL),
    _op(_LOAD, _NR), _op(_AT_LEAST, _X32, no=1), _op(_RETURN, _KILL),
)  # fmt: skip
