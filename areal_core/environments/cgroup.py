"""A control group for one sandbox: the memory and the processes of all of it together, where this process may make one.

    with control_group(memory_bytes, processes) as group: ...    # None where it may not

Limits of processes (rlimits) are there in any case; what they leave open is the sum.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_MOUNTED = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folders: tuple[Path, ...]  # one of version 2, or one of each controller of version 1

    def ran_out(self) -> bool:
        """Whether the kernel has killed one of its processes for memory."""
        for file in (folder / name for folder in self.folders for name in ("memory.events", "memory.oom_control")):
            if file.exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts.get("oom_kill", 0)) > 0
        return False


@contextmanager
def control_group(memory_bytes: int, processes: int) -> Iterator[ControlGroup | None]:
    """Removed at the end, when no process is left in it."""
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
        except OSError:  # read-only, another user's, or without these controllers
            made.clear()
        yield ControlGroup(tuple(made)) if made else None


def _parents(memory: str, processes: str) -> Mapping[Path, Mapping[str, str]]:
    """The groups that this process is in, and what is to be limited below them."""
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
    """Remove the empty groups that processes left behind which were killed."""
    for parent in _parents("", ""):
        for folder in parent.glob("areal-*"):
            if not Path("/proc", folder.name.split("-")[1]).exists():
                _remove(folder)
