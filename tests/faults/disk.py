"""A disk that loses power: what it may hold then of what processes wrote into a folder.

power.c, a library that the processes have preloaded, logs every change and every sync of files below the folder. Here
the log is read, and an *image* of the folder is made: all that was synced before the cut is there; of the rest, by a
seeded choice, some, all or none. Files keep or lose whole writes, or 4 KiB blocks of them; names (creations, renames,
removals) that no sync of their folder covers are kept or lost, too.

Syncing a file does not sync its name. As on ext4, xfs and btrfs, whoever syncs a file or a folder finds the folders
above it as well.
"""

from __future__ import annotations

import atexit
import copy
import mmap
import os
import random
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("=IIQQQQQQ")
_MAGIC = 0x4B534944
_BLOCK = 4096
_FOLDER = 1  # kind of a LINK
_SOURCE = Path(__file__).with_name("power.c")


class Op(IntEnum):
    """What a record is of; power.c has the same numbers."""

    WRITE = 1
    TRUNCATE = 2
    LINK = 3
    UNLINK = 4
    RENAME = 5
    SYNC = 6
    SYNC_ALL = 7


class Record(NamedTuple):
    """One call of one process. Fields as in power.c."""

    op: Op
    sequence: int
    start: int
    inode: int
    a: int
    b: int
    data: bytes


def compiler() -> str | None:
    """A C compiler, without which there is no library."""
    return shutil.which("cc") or shutil.which("gcc")


@cache
def library() -> str:
    """The compiled library, removed when this process ends. Raises CalledProcessError."""
    folder = tempfile.mkdtemp(prefix="areal-power-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [compiler() or "cc", "-O2", "-shared", "-fPIC", "-o", f"{folder}/power.so", _SOURCE, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return f"{folder}/power.so"


class Clock:
    """The wall clock of processes, which may be wrong."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(8))
        self._file = file

    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": library(), "AREAL_CLOCK": str(self._file)}

    def jump(self, seconds: float) -> None:
        """From now on, the clock is wrong by so much."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", int(seconds * 1e9)))


class Disk:
    """The disk below `root`, from now on. What is there now is synced. `logs` is made, elsewhere."""

    def __init__(self, root: Path, logs: Path) -> None:
        self.root = root.resolve()
        self._logs = logs.resolve()
        self._logs.mkdir(parents=True)
        (self._logs / "sequence").write_bytes(bytes(8))
        self._before = _Tree(self.root)

    def environment(self) -> dict[str, str]:
        """Of processes whose files are to be followed, and of those that they start."""
        return {"LD_PRELOAD": library(), "AREAL_DISK_ROOT": str(self.root), "AREAL_DISK_LOG": str(self._logs)}

    def now(self) -> int:
        """The number of records so far: power may be lost after any of them."""
        with (self._logs / "sequence").open("rb") as file, mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ) as seen:
            return int.from_bytes(seen[:8], "little")

    def records(self) -> list[Record]:
        """All records, in their order."""
        found = [record for file in self._logs.glob("*.log") for record in _read(file.read_bytes())]
        return sorted(found, key=lambda record: record.sequence)

    def image(self, target: Path, cut: int, seed: int) -> None:
        """Write what the disk may hold when power is lost after record `cut` to the new folder `target`."""
        tree = copy.deepcopy(self._before)
        for record in self.records():
            if record.sequence <= cut:
                tree.apply(record)
        tree.write(target, random.Random(seed))

    def lose_power(self, cut: int, seed: int) -> None:
        """Put an image in the place of the folder itself, in which nothing may run any more."""
        image = self.root.with_name(f"{self.root.name}.image")
        self.image(image, cut, seed)
        shutil.rmtree(self.root)
        image.rename(self.root)


def _read(data: bytes) -> Iterator[Record]:
    """The records of a log; one is left out where its process was killed while it wrote."""
    at = 0
    while 0 <= at <= len(data) - _HEADER.size:
        magic, op, sequence, start, inode, a, b, length = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length
        if magic == _MAGIC and end <= len(data):
            yield Record(Op(op), sequence, start, inode, a, b, data[at + _HEADER.size : end])
            at = end
        else:
            at = data.find(struct.pack("=I", _MAGIC), at + 1)


class _Loss:
    """Which of some changes, in their order, a loss of power leaves: all, none, some by chance, or those before one,
    which is itself `torn`; or all are torn."""

    def __init__(self, count: int, chance: random.Random, *modes: str) -> None:
        self._mode = chance.choice(("all", "none", "some", "prefix", *modes))
        self._last = chance.randrange(count + 1)
        self._chance = chance

    def keeps(self, number: int) -> bool:
        some = self._mode == "some" and self._chance.random() < 0.5
        return self._mode == "all" or some or (self._mode == "prefix" and number < self._last)

    def tears(self, number: int) -> bool:
        return self._mode == "torn" or (self._mode == "prefix" and number == self._last)


@dataclass(slots=True)
class _Change:
    """A write or a new size of a file."""

    sequence: int
    offset: int
    data: bytes | None  # None: the file ends at `offset`
    synced: bool

    def apply(self, content: bytearray, blocks: random.Random | None = None) -> None:
        """`blocks`: only some blocks of it."""
        if self.data is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
            return
        first = self.offset - self.offset % _BLOCK
        for start in range(first, self.offset + len(self.data), _BLOCK):
            if blocks is not None and blocks.random() < 0.5:
                continue
            low, high = max(start, self.offset), min(start + _BLOCK, self.offset + len(self.data))
            content.extend(bytes(max(0, high - len(content))))
            content[low:high] = self.data[low - self.offset : high - self.offset]


@dataclass(slots=True)
class _File:
    """A file: what is on the disk for certain, and what was changed after that."""

    content: bytes = b""
    changes: list[_Change] = field(default_factory=list[_Change])

    def sync(self, start: int) -> None:
        for change in self.changes:
            change.synced = change.synced or change.sequence <= start

    def after(self, chance: random.Random) -> bytes:
        """What is there after the loss."""
        content, loss = bytearray(self.content), _Loss(len(self.changes), chance, "torn")
        for number, change in enumerate(self.changes):
            if change.synced or loss.keeps(number):
                change.apply(content)
            elif loss.tears(number):
                change.apply(content, chance)
        return bytes(content)


@dataclass(slots=True)
class _Naming:
    """A change of names: each of `removed` and `put` is (folder, name)."""

    sequence: int
    removed: tuple[int, str] | None
    put: tuple[int, str, int] | None  # and what has that name
    synced: bool = False

    def apply(self, folders: dict[int, dict[str, int]]) -> None:
        if self.removed is not None:
            folders[self.removed[0]].pop(self.removed[1], None)
        if self.put is not None:
            folder, name, what = self.put
            folders[folder][name] = what

    def touches(self, folder: int) -> bool:
        return folder in ((self.removed or (None,))[0], (self.put or (None,))[0])


class _Tree:
    """Files and folders by numbers that are never used twice, as inodes are."""

    def __init__(self, root: Path) -> None:
        self._files: dict[int, _File] = {}
        self._folders: dict[int, dict[str, int]] = {}  # as it is on the disk for certain
        self._live: dict[int, dict[str, int]] = {}  # as processes see it
        self._numbers: dict[int, int] = {}  # inode -> number
        self._next = 0
        self._namings: list[_Naming] = []
        self._root = self._scan(root)

    def _scan(self, folder: Path) -> int:
        number = self._number(folder.stat().st_ino)
        names = self._folders[number] = {}
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                names[entry.name] = self._scan(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                names[entry.name] = self._number(entry.inode())
                self._files[names[entry.name]] = _File(Path(entry.path).read_bytes())
        self._live[number] = dict(names)
        return number

    def _number(self, inode: int, *, new: bool = False) -> int:
        if new or inode not in self._numbers:
            self._numbers[inode] = self._next
            self._next += 1
        return self._numbers[inode]

    # -- while there is power --------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        if record.op in (Op.WRITE, Op.TRUNCATE):
            written = record.op is Op.WRITE
            change = _Change(record.sequence, record.a, record.data if written else None, written and bool(record.b))
            self._files.setdefault(self._number(record.inode), _File()).changes.append(change)
        elif record.op is Op.SYNC:
            self._sync(self._number(record.inode), record.start)
        elif record.op is Op.SYNC_ALL:
            for number in (*self._files, *self._live):
                self._sync(number, record.start)
        else:
            self._rename(record)

    def _rename(self, record: Record) -> None:
        if record.op is Op.LINK:
            naming = self._link(record)
        elif record.op is Op.UNLINK:
            naming = _Naming(record.sequence, (self._number(record.a), record.data.decode()), None)
        else:
            old, new = record.data.decode().split("\0")
            number = self._number(record.inode)
            naming = _Naming(record.sequence, (self._number(record.a), old), (self._number(record.b), new, number))
        if naming is None:
            return
        for place in filter(None, (naming.removed, naming.put)):
            self._live.setdefault(place[0], {})
        naming.apply(self._live)
        self._namings.append(naming)

    def _link(self, record: Record) -> _Naming | None:
        folder, name, number = self._number(record.a), record.data.decode(), self._number(record.inode)
        if self._live.get(folder, {}).get(name) == number:
            return None  # opened, not made
        if not any(number in names.values() for names in self._live.values()):
            number = self._number(record.inode, new=True)  # the inode of one that is gone, used again
        if record.b == _FOLDER:
            self._live.setdefault(number, {})
        else:
            self._files.setdefault(number, _File())
        return _Naming(record.sequence, None, (folder, name, number))

    def _sync(self, number: int, start: int) -> None:
        if number in self._files:
            self._files[number].sync(start)
        else:
            for naming in self._namings:
                naming.synced = naming.synced or (naming.touches(number) and naming.sequence <= start)
        path = self._above(number)
        for naming in self._namings:
            if naming.sequence <= start and naming.put is not None and naming.put[2] in path:
                naming.synced = True

    def _above(self, number: int) -> set[int]:
        """What has to be found for a folder to be reached: itself, and the folders above."""
        parents = {below: folder for folder, names in self._live.items() for below in names.values()}
        found: set[int] = set()
        at = number if number in self._live else parents.get(number, self._root)
        while at != self._root and at not in found:
            found.add(at)
            at = parents.get(at, self._root)
        return found

    # -- after it is lost ------------------------------------------------------------------------------------------

    def write(self, target: Path, chance: random.Random) -> None:
        folders = {number: dict(self._folders.get(number, {})) for number in {*self._folders, *self._live}}
        loss = _Loss(len(self._namings), chance)
        for number, naming in enumerate(self._namings):
            if naming.synced or loss.keeps(number):
                naming.apply(folders)

        def write(target: Path, folder: int) -> None:
            target.mkdir()
            for name, number in sorted(folders[folder].items()):
                if number in folders:
                    write(target / name, number)
                else:
                    known = self._files.get(number, _File())  # none: who looks on has made it, as SQLite does
                    (target / name).write_bytes(known.after(chance))

        write(target, self._root)
