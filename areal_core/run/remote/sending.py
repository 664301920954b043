"""What processes of a remote worker write, sent on to the head node: their logs and timelines, as they grow.

The files here are the buffer: while the head node is away nothing is kept besides, and nothing is lost. The head node
takes what fits its own file's size, so that what was sent without an answer is not there twice. It rotates logs by
itself. A file that was emptied here, and may have grown again, is known by the bytes that were sent last.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from areal_core.api.head import AwayError
from areal_core.run.remote.share import LOGS
from areal_core.storage.rundir import write_json

_PIECE = 256 * 1024  # bytes of a request
_TAIL = 64  # bytes, the last that were sent
_NOWHERE = -1  # an offset that fits no file: the head node says how large its own is


Append = Callable[[str, int, bytes], tuple[bool, int] | None]
"""Whether these bytes are now the end of a file of the head node's that had so many, and its size; None if it takes no
more. Raises AwayError."""


@dataclasses.dataclass(slots=True)
class _Sent:
    """How far a file has been sent."""

    begin: int  # where, in the head node's file, this machine's begins: below 0 once that one has begun anew
    size: int = 0  # bytes
    tail: str = ""  # the last of them, hexadecimal


class Sender:
    """Sends some files of one folder: "logs/generation-0.log". Not thread-safe."""

    def __init__(self, root: Path, names: Iterable[str], append: Append, state: Path) -> None:
        """`state` keeps how far files have been sent, from one remote worker of a folder to the next."""
        self._state = state
        self._kept = _read(state)
        self._files = [_File(root / name, name, append, self._kept.get(name)) for name in names]

    def look(self, *, last: bool = False) -> bool:
        """Send what is new: whole lines, and with `last` what is there. Whether the head node has it all now: while it
        is away, the next look goes on."""
        try:
            for file in self._files:
                file.send(last=last)
            return True
        except AwayError:
            return False
        finally:
            sent = {file.name: dataclasses.asdict(file.sent) for file in self._files if file.sent is not None}
            if sent != self._kept:
                write_json(self._state, sent)
                self._kept = sent


class _File:
    """One file."""

    def __init__(self, path: Path, name: str, append: Append, sent: dict[str, Any] | None) -> None:
        self.name = name
        self.sent = None if sent is None else _Sent(**sent)  # None: the head node has not heard of it
        self._path = path
        self._append = append
        self._is_log = name.startswith(f"{LOGS}/")
        self._is_full = False  # the head node takes no more

    def send(self, *, last: bool) -> None:
        if not self._path.exists():
            return
        sent = self.sent = self.sent or self._begin()
        with self._path.open("rb") as file:
            if not _goes_on(file, sent):
                self._send_rotated(sent)
                sent = self.sent = _Sent(sent.begin + sent.size)
            self._send(file, sent, last=last)

    def _begin(self) -> _Sent:
        """The head node's file has nothing of this one yet."""
        answer = self._append(self.name, _NOWHERE, b"")
        return _Sent(0 if answer is None else answer[1])

    def _send_rotated(self, sent: _Sent) -> None:
        """Send what was written before the file was emptied, which the newest older one holds."""
        older = self._path.with_name(f"{self._path.name}.1")
        if older.exists():
            with older.open("rb") as file:
                if _goes_on(file, sent):
                    self._send(file, sent, last=True)

    def _send(self, file: IO[bytes], sent: _Sent, *, last: bool) -> None:
        aligned = False
        while not self._is_full:
            file.seek(sent.size)
            data = file.read(_PIECE)
            if not last and len(data) < _PIECE:
                data = data[: data.rfind(b"\n") + 1]
            if not data:
                return
            answer = self._append(self.name, sent.begin + sent.size, data)
            if answer is None:
                self._is_full = True
            elif answer[0]:
                sent.size += len(data)
                sent.tail = (bytes.fromhex(sent.tail) + data)[-_TAIL:].hex()
                aligned = False
            elif aligned:
                return  # the next look tries again
            else:
                self._align(file, sent, answer[1])
                aligned = True

    def _align(self, file: IO[bytes], sent: _Sent, size: int) -> None:
        """The head node's file has `size` bytes: it has taken more than it could say, or it is not the one it was. Then
        this one goes on behind what is there; a timeline begins again where another head node has nothing of it."""
        least = sent.size if self._is_log else 0  # a log that is empty was rotated
        if least <= size - sent.begin <= file.seek(0, 2):
            sent.size = size - sent.begin
            sent.tail = _before(file, sent.size).hex()
        else:
            sent.begin = size - sent.size


def _goes_on(file: IO[bytes], sent: _Sent) -> bool:
    """Whether the file has only grown since it was sent so far."""
    return file.seek(0, 2) >= sent.size and _before(file, sent.size).hex() == sent.tail


def _before(file: IO[bytes], position: int) -> bytes:
    file.seek(max(0, position - _TAIL))
    return file.read(min(position, _TAIL))


def _read(state: Path) -> dict[str, Any]:
    try:
        return json.loads(state.read_text())
    except FileNotFoundError:
        return {}
