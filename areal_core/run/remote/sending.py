"""Send the growing logs and timelines of a remote worker's processes to the head node.

The files on this machine are the buffer. Nothing is lost while the head node is unreachable, except log lines that are
rotated away meanwhile. Each request names the expected size of the head node's file. So data is not appended twice if
the response to a request was lost. The head node rotates its logs by itself.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from areal_core.api.head import HeadNodeError
from areal_core.run.remote.share import TIMELINE
from areal_core.storage.rundir import write_json

_PIECE = 256 * 1024  # most bytes per request
_NOWHERE = -1  # an offset that matches no file, so that the head node responds with its file's size


Append = Callable[[str, int, bytes], tuple[bool, int]]
"""Append bytes to a file of the head node if it has `offset` bytes: (appended, new size). Raises HeadNodeError."""


class Sender:
    """Sends the files of one folder, such as "logs/generation-0.log". Not thread-safe."""

    def __init__(self, root: Path, names: Iterable[str], append: Append, state: Path) -> None:
        """`state` is a file that records the progress across restarts of the remote worker."""
        self._root, self._names, self._append, self._state = root, tuple(names), append, state
        # Per file: bytes sent so far, and the size of the head node's file after that.
        self._sent: dict[str, list[int]] = json.loads(state.read_text()) if state.exists() else {}

    def send_new(self, *, last: bool = False) -> bool:
        """Send new data: complete lines, or all bytes with `last`. Returns whether all of it arrived.
        If the head node is unreachable, the next call continues."""
        before = copy.deepcopy(self._sent)
        try:
            for name in self._names:
                if (self._root / name).exists():
                    self._send(name, self._root / name, last=last)
            return True
        except HeadNodeError:
            return False
        finally:
            if self._sent != before:
                write_json(self._state, self._sent)

    def _send(self, name: str, path: Path, *, last: bool) -> None:
        if name not in self._sent:
            self._sent[name] = [0, self._append(name, _NOWHERE, b"")[1]]
        if path.stat().st_size < self._sent[name][0]:  # rotated: the newest older file holds the earlier lines
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
                elif sent[1] < size <= sent[1] + path.stat().st_size - sent[0]:  # arrived, but its response was lost
                    sent[0] += size - sent[1]
                elif size == 0 and name.startswith(f"{TIMELINE}/"):  # another head node; an empty log was rotated
                    sent[0] = 0
                sent[1] = size
