"""What processes of a remote worker write, sent on to the head node: their logs and timelines, as they grow.

The files here are the buffer: while the head node is away nothing is kept besides, and nothing is lost but of a log
that is rotated meanwhile. The head node takes what fits its own file's size, so that what was sent without an answer is
not there twice. It rotates logs by itself.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from areal_core.api.head import AwayError
from areal_core.run.remote.share import TIMELINE
from areal_core.storage.rundir import write_json

_PIECE = 256 * 1024  # bytes of a request
_NOWHERE = -1  # an offset that fits no file: the head node says how large its own is


Append = Callable[[str, int, bytes], tuple[bool, int]]
"""Whether these bytes are now the end of a file of the head node's that had so many, and its size. Raises AwayError."""


class Sender:
    """Sends some files of one folder: "logs/generation-0.log". Not thread-safe."""

    def __init__(self, root: Path, names: Iterable[str], append: Append, state: Path) -> None:
        """`state` keeps how far files have been sent, from one remote worker of a folder to the next."""
        self._root, self._names, self._append, self._state = root, tuple(names), append, state
        # Of each file: its bytes that were sent, and the size of the head node's file then.
        self._sent: dict[str, list[int]] = json.loads(state.read_text()) if state.exists() else {}

    def look(self, *, last: bool = False) -> bool:
        """Send what is new: whole lines, and with `last` what is there. Whether the head node has it all now: while it
        is away, the next look goes on."""
        before = copy.deepcopy(self._sent)
        try:
            for name in self._names:
                if (self._root / name).exists():
                    self._send(name, self._root / name, last=last)
            return True
        except AwayError:
            return False
        finally:
            if self._sent != before:
                write_json(self._state, self._sent)

    def _send(self, name: str, path: Path, *, last: bool) -> None:
        if name not in self._sent:
            self._sent[name] = [0, self._append(name, _NOWHERE, b"")[1]]
        if path.stat().st_size < self._sent[name][0]:  # rotated: the newest older file has what was written before
            older = path.with_name(f"{path.name}.1")
            if older.exists():
                self._send_pieces(name, older, last=True)
            self._sent[name][0] = 0
        self._send_pieces(name, path, last=last)

    def _send_pieces(self, name: str, path: Path, *, last: bool) -> None:
        sent = self._sent[name]
        with path.open("rb") as file:
            while True:
                file.seek(sent[0])
                data = file.read(_PIECE)
                if not last and len(data) < _PIECE:
                    data = data[: data.rfind(b"\n") + 1]
                if not data:
                    return
                fits, size = self._append(name, sent[1], data)
                if fits:
                    sent[0] += len(data)
                elif sent[1] < size <= sent[1] + path.stat().st_size - sent[0]:  # it has taken what it did not answer
                    sent[0] += size - sent[1]
                elif size == 0 and name.startswith(f"{TIMELINE}/"):  # another head node; an empty log was rotated
                    sent[0] = 0
                sent[1] = size
