"""What processes of a remote worker write, sent on to the head node: their logs and timelines, as they grow.

The files here are the buffer: while the head node is away nothing is kept besides, and nothing is lost. A log that is
rotated here is rotated there. How far a file has been sent the head node knows, by the size of its own; what has to be
known besides is where in it this machine's part begins: in a timeline behind that of a machine that had the share
before, in a log at its start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Protocol

from areal_core.run.remote.share import LOGS
from areal_core.storage.rundir import write_json

_PIECE = 256 * 1024  # bytes of a request
_TAIL = 64  # bytes before what is not sent yet, by which a file is known that was emptied and has grown again


class Channel(Protocol):
    """To the head node. Raises AwayError."""

    def append(self, name: str, offset: int, data: bytes) -> tuple[bool, int] | None:
        """Whether `data` is now the end of a file that had `offset` bytes, and its size; None if it takes no more."""
        ...

    def begin_anew(self, name: str) -> None:
        """Have a log begin anew."""
        ...


class Sender:
    """Sends some files of one folder: "logs/generation-0.log". Not thread-safe."""

    def __init__(self, root: Path, names: Iterable[str], channel: Channel, state: Path) -> None:
        """`state` keeps, from one remote worker of a folder to the next, where the parts of this machine begin."""
        self._state = state
        self._begins = dict(_read(state))
        self._files = [_Sent(root / name, name, channel, self._begins) for name in names]

    def look(self, *, last: bool = False) -> None:
        """Send what is new: whole lines, and with `last` what is there. Raises AwayError; the next look goes on."""
        try:
            for file in self._files:
                file.send(last=last)
        finally:
            if self._begins != _read(self._state):
                write_json(self._state, self._begins)


class _Sent:
    """One file, and how far it has been sent."""

    def __init__(self, path: Path, name: str, channel: Channel, begins: dict[str, int]) -> None:
        self._path = path
        self._name = name
        self._channel = channel
        self._begins = begins  # by name: where this machine's part begins in the head node's file
        self._is_log = name.startswith(f"{LOGS}/")
        self._size: int | None = None  # bytes that have been sent of the file as it is now; None: to be found out
        self._tail = b""  # the last of them
        self._is_full = False  # the head node takes no more

    def send(self, *, last: bool) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if self._size is None:
                self._meet(file)
            if not self._goes_on(file):
                self._send_rotated()
                self._begin()
            self._send(file, last=last)

    def _meet(self, file: IO[bytes]) -> None:
        """Find out how far an earlier remote worker has come, or begin behind what another machine has sent."""
        self._size, self._tail = 0, b""
        if self._name not in self._begins:
            self._begin()
        elif (answer := self._channel.append(self._name, -1, b"")) is not None:
            self._align(file, answer[1])

    def _begin(self) -> None:
        """The head node's file has nothing of this one yet."""
        self._size, self._tail, self._is_full = 0, b"", False
        if self._is_log:
            self._channel.begin_anew(self._name)
            self._begins[self._name] = 0
        elif (answer := self._channel.append(self._name, -1, b"")) is not None:
            self._begins[self._name] = answer[1]

    def _align(self, file: IO[bytes], size: int) -> None:
        """The head node's file has `size` bytes: up to where this one has been sent, or it is not the one it was."""
        assert self._size is not None
        sent = size - self._begins[self._name]
        if 0 <= sent <= file.seek(0, 2):
            self._size, self._tail = sent, _before(file, sent)
        elif self._is_log:
            self._begin()
        else:
            self._begins[self._name] = size - self._size

    def _goes_on(self, file: IO[bytes]) -> bool:
        """Whether the file has only grown since the last look."""
        assert self._size is not None
        return file.seek(0, 2) >= self._size and _before(file, self._size) == self._tail

    def _send_rotated(self) -> None:
        """Send what was written before the file was emptied, which the newest older one holds."""
        older = self._path.with_name(f"{self._path.name}.1")
        if older.exists():
            with older.open("rb") as file:
                if self._goes_on(file):
                    self._send(file, last=True)

    def _send(self, file: IO[bytes], *, last: bool) -> None:
        aligned = False
        while not self._is_full:
            assert self._size is not None
            file.seek(self._size)
            data = file.read(_PIECE)
            if not last and len(data) < _PIECE:
                data = data[: data.rfind(b"\n") + 1]
            if not data:
                return
            answer = self._channel.append(self._name, self._begins[self._name] + self._size, data)
            if answer is None:
                self._is_full = True
            elif answer[0]:
                self._size += len(data)
                self._tail = (self._tail + data)[-_TAIL:]
            elif aligned:
                return  # the next look tries again
            else:
                self._align(file, answer[1])
                aligned = True


def _before(file: IO[bytes], position: int) -> bytes:
    file.seek(max(0, position - _TAIL))
    return file.read(min(position, _TAIL))


def _read(state: Path) -> Mapping[str, int]:
    try:
        return json.loads(state.read_text())
    except (FileNotFoundError, ValueError):
        return {}
