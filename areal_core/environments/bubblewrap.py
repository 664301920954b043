"""Build a sandbox's command line (bubblewrap with Python inside) and its control group.

command(settings, processes) -> words of the command, and the files that it inherits
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import marshal
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from areal_core.environments import confined
from areal_core.environments.confinement import syscall_filter

logger = logging.getLogger(__name__)

_MOUNTED = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folders: tuple[Path, ...]  # one of version 2, or one for each controller of version 1

    def ran_out(self) -> bool:
        """Whether the kernel has killed one of the group's processes for memory."""
        for file in (folder / name for folder in self.folders for name in ("memory.events", "memory.oom_control")):
            if file.exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts.get("oom_kill", 0)) > 0
        return False


@contextmanager
def control_group(memory_bytes: int, processes: int) -> Iterator[ControlGroup | None]:
    """Create a control group with limits, and remove it at the end; None without the rights to do so."""
    name = f"areal-{os.getpid()}-{secrets.token_hex(4)}"
    made: list[Path] = []
    with ExitStack() as stack:
        try:
            for parent, limits in _parents(str(memory_bytes), str(processes)).items():
                (folder := parent / name).mkdir()
                stack.callback(_remove, folder)
                for file, value in limits.items():
                    (folder / file).write_text(value)
                made.append(folder)
        except OSError:  # read-only, owned by another user, or without these controllers
            made.clear()
        yield ControlGroup(tuple(made)) if made else None


def _parents(memory: str, processes: str) -> Mapping[Path, Mapping[str, str]]:
    """The control groups of this process, and the limits to set in a group below each."""
    own = dict[str, Path]()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= {controller: Path(path.lstrip("/")) for controller in controllers.split(",")}
    if {"memory", "pids"} <= own.keys():
        return {
            _MOUNTED / "memory" / own["memory"]: {"memory.limit_in_bytes": memory},
            _MOUNTED / "pids" / own["pids"]: {"pids.max": processes},
        }
    if "" in own and (_MOUNTED / "cgroup.controllers").exists():
        return {_MOUNTED / own[""]: {"memory.max": memory, "memory.swap.max": "0", "pids.max": processes}}
    return {}


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:  # another process has removed it
        pass
    except OSError as error:
        logger.warning("%s can't be removed: %s", folder, error)


def remove_abandoned() -> None:
    """Remove empty control groups left by killed processes."""
    for parent in _parents("", ""):
        for folder in parent.glob("areal-*"):
            if not Path("/proc", folder.name.split("-")[1]).exists():
                _remove(folder)


FOLDER_BYTES = 64 * 2**20  # limit of the sandbox's own folder, and of a single file
_OTHERS = 2  # further processes in the control group: bubblewrap, and the first process inside
_USERS = 1000  # least number of users of root's namespace, so that each sandbox gets its own
_PACKAGES = ("numpy", "sortedcontainers")  # installed packages that programs may import, as in the benchmarks' judges
_CONFINED = marshal.dumps(compile(Path(confined.__file__).read_bytes(), "confined.py", "exec"))
_SCRIPT = importlib.util.MAGIC_NUMBER + bytes(12) + _CONFINED  # as a .pyc, which saves every sandbox 2 ms
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit; shift; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Command:
    words: list[str]
    passed: tuple[int, ...]  # file descriptors that the command inherits
    info: BinaryIO | None  # bubblewrap reports the first process inside here; None without bubblewrap
    group: ControlGroup | None


@contextmanager
def command(settings: Mapping[str, Any], processes: int) -> Iterator[Command]:
    """Build the command of one sandbox. Its files and control group exist until the context ends."""
    with ExitStack() as stack:
        group = stack.enter_context(control_group(settings["memory_bytes"], processes + _OTHERS))
        script, refused = (stack.enter_context(in_memory(data)).fileno() for data in (_SCRIPT, syscall_filter()))
        info, report = (stack.enter_context(open(end, mode)) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        os.set_blocking(info.fileno(), False)
        uid = _own_uid()
        counted = processes + (uid is None)  # the first process inside has another user, or counts toward the limit
        settings = {**settings, "processes": counted, "uid": uid, "packages": ["/packages"]}
        words = _bubblewrapped(settings, script, refused, report.fileno())
        if group is not None:
            members = [str(folder / "cgroup.procs") for folder in group.folders]  # a process writes its id here
            words = ["/bin/sh", "-c", _ENTER, "sh", *members, "--", *words]
        yield Command(words, (script, refused, report.fileno()), info, group)


def in_memory(content: bytes) -> BinaryIO:
    """Return an in-memory file that holds `content`, positioned at its beginning."""
    file = open(os.memfd_create("areal"), "w+b")  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.seek(0)
    return file


def python(script: str, settings: Mapping[str, Any]) -> list[str]:
    """Command for Python without site-packages, and without the current folder in the import path."""
    return [os.path.realpath(sys.executable), "-P", "-s", "-S", script, json.dumps(settings)]


def _bubblewrapped(settings: Mapping[str, Any], script: int, refused: int, report: int) -> list[str]:
    """Build bubblewrap's words.
    The file descriptors are of `confined` (`script`), of the system call filter (`refused`), and of the pipe for
    bubblewrap's report (`report`)."""
    if settings["uid"] is not None:
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # `confined` gives these up
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    return [
        shutil.which("bwrap") or "bwrap", *user, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--as-pid-1", "--die-with-parent",
        "--new-session", "--seccomp", str(refused), "--info-fd", str(report),
        *_system(), "--perms", "0444", "--ro-bind-data", str(script), "/confined.pyc", "--proc", "/proc",
        "--dev", "/dev",
        "--perms", "1777", "--size", str(FOLDER_BYTES), "--tmpfs", "/box", "--remount-ro", "/dev",
        "--remount-ro", "/", "--chdir", "/box", "--", *python("/confined.pyc", settings),
    ]  # fmt: skip


@functools.cache
def _system() -> tuple[str, ...]:
    """Mounts that a Python program needs: libraries, and Python if it is installed elsewhere."""
    shown = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ("/bin", "/lib", "/lib64"):
        if os.path.islink(folder):
            shown += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            shown += ["--ro-bind", folder, folder]
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        for folder in reversed(prefix.parents[:-1]):
            shown += ["--perms", "0755", "--dir", str(folder)]  # empty except for the next folder
        shown += ["--ro-bind", str(prefix), str(prefix)]
    shown += ["--perms", "0755", "--dir", "/packages"]
    for path in packages():
        shown += ["--ro-bind", str(path), f"/packages/{path.name}"]
    return tuple(shown)


@functools.cache
def packages() -> tuple[Path, ...]:
    """Folders of the allowed packages, and of the libraries bundled with them."""
    found = (importlib.util.find_spec(name) for name in _PACKAGES)
    folders = [Path(spec.submodule_search_locations[0]) for spec in found if spec and spec.submodule_search_locations]
    return tuple(path for folder in folders for path in (folder, folder.with_suffix(".libs")) if path.is_dir())


def _own_uid() -> int | None:
    """A random user id that no other sandbox has, for root to become; None if root can't.
    Then the sandbox gets a user namespace, whose process count starts at 0."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    first, _, count = max((tuple(map(int, line.split())) for line in lines), key=lambda line: line[2])
    if os.geteuid() != 0 or count < _USERS:
        return None
    return first + count - 2 - secrets.randbelow(min(count // 2, 2**30))
