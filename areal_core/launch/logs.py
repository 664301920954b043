"""Logs of a run: one format for every process, on top of the standard `logging` package, in files that are rotated.

    2026-11-23T03:22:48.123Z WARNING trainer-1 [step 7] message                                 launch.log_format=text
    {"time": ..., "level": ..., "role": "trainer", "index": 1, "rank": 1, "step": 7, "message": ...}             json

Time is UTC. A process calls `start` once; its format and its index come from its supervisor, through the environment.
One that a person started has no supervisor, and writes messages alone, as `plain` extracts them from a line. What
native libraries and vLLM write into the same file stays as it is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

from areal_core.config.schema import LaunchConfig
from areal_core.errors import printable, printable_lines
from areal_core.storage.durable import free_inodes

FORMAT = "AREAL_LOG_FORMAT"  # text or json; unset: a person reads
INDEX = "AREAL_INDEX"  # of a process in its role
_TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z ([A-Z]+) (\S+-\d+) (?:\[step \d+\] )?(.*)")
_TAIL_BYTES = 64 * 1024  # of new log lines that are read at once; older ones stay in the file
_LINE_CHARS = 500
_LAST_LINES = 6  # of a log, in an error
_LINE_ROOM = 64 * 1024  # bytes free on a disk, without which it counts as full

logger = logging.getLogger(__name__)
_step: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The process that a line is from."""

    role: str
    index: int = 0
    rank: int | None = None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


def start(role: str, index: int | None = None) -> None:
    """Set up the logging of this process, on stderr. Warnings and uncaught exceptions become records as well.

    `index`: of this process in its role; None: the one that its supervisor has put into the environment.
    """
    rank = int(os.environ["RANK"]) if role == "trainer" and "RANK" in os.environ else None
    source = Source(role, int(os.environ.get(INDEX, "0")) if index is None else index, rank)
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(os.environ.get(FORMAT), source))
    logging.basicConfig(handlers=[handler])
    for ours in ("areal_core", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def at_step(step: int) -> None:
    """Set the training step of the lines that follow, except those that name their own (`extra={"step": k}`)."""
    global _step
    _step = step


class Journal:
    """A launcher's own messages: passed to `tell`, and kept in a log of its own, since its stderr is a person's
    terminal. What the log has no room for is told all the same."""

    def __init__(self, path: Path, launch: LaunchConfig, source: Source, tell: Callable[[str], None]) -> None:
        handler = _JournalFile(path, maxBytes=launch.log_bytes, backupCount=launch.log_files, delay=True)
        handler.setFormatter(Formatter(launch.log_format, source))
        self._logger = logging.Logger(source.name)  # without a parent: nothing goes on to the root's handlers
        self._logger.addHandler(handler)
        self._tell = tell

    def __call__(self, line: str, level: int = logging.WARNING) -> None:
        """A warning unless `level` says otherwise: a launcher reports what goes wrong."""
        self._logger.log(level, "%s", line)
        self._tell(line)


class _JournalFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """A full disk is no reason for a traceback on a person's terminal."""
        if not _full(sys.exception()):
            super().handleError(record)


class Formatter(logging.Formatter):
    """That of a `launch.log_format`; None: messages alone, for a person."""

    def __init__(self, log_format: str | None, source: Source) -> None:
        super().__init__()
        self._format, self._source = log_format, source

    def format(self, record: logging.LogRecord) -> str:
        """A message stays on one line, as it may quote a completion. A traceback keeps its lines."""
        source, message, step = self._source, record.getMessage(), getattr(record, "step", _step)
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._format == "json":
            values = {
                "time": when,
                "level": record.levelname,
                "role": source.role,
                "index": source.index,
                "rank": source.rank,
                "step": step,
                "message": message,
                "traceback": self.formatException(record.exc_info) if record.exc_info else None,
            }
            return json.dumps({name: value for name, value in values.items() if value is not None})
        text = printable(message) + printable_lines(super().format(record).removeprefix(message))
        if self._format is None:
            return _shown(record.levelname, text)
        at = "" if step is None else f"[step {step}] "
        return f"{when} {record.levelname} {source.name} {at}{text}"


def plain(line: str, name: str) -> list[str]:
    """The message of a line in the log of process `name`, as a person reads it: an error is marked as one, and the
    process is named where it is another one. A line of neither format is returned as it is."""
    if match := _TEXT_LINE.fullmatch(line):
        level, who, message = match.groups()
    elif (record := _record(line)) is not None:
        level, who = record["level"], f"{record['role']}-{record['index']}"
        traceback = printable_lines(record.get("traceback") or "")
        message = "\n".join(part for part in (printable(record["message"]), traceback) if part)
    else:
        return [line]
    shown = _shown(level, message)
    return (shown if who == name else f"{who}: {shown}").splitlines()


def _record(line: str) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line) if line.startswith('{"time": ') else None
    except ValueError:  # an incomplete line
        return None
    return record if record and record.keys() >= {"level", "role", "index", "message"} else None


def _shown(level: str, message: str) -> str:
    return f"areal: error: {message}" if level in ("ERROR", "CRITICAL") else message


def _uncaught(kind: type[BaseException], error: BaseException | None, traceback: Any, where: str = "") -> None:
    if full := _full(error):
        logger.critical("a disk is full%s: %s", where and f",{where}", full)
    elif where or issubclass(kind, Exception):
        logger.critical("uncaught exception%s", where, exc_info=(kind, error or kind(), traceback))
    else:
        sys.__excepthook__(kind, error or kind(), traceback)


def _uncaught_in_thread(thrown: threading.ExceptHookArgs) -> None:
    where = f" in {thrown.thread.name if thrown.thread else 'a thread'}"
    _uncaught(thrown.exc_type, thrown.exc_value, thrown.exc_traceback, where)


def _full(error: BaseException | None) -> str | None:
    """What a full disk, or a quota that is used up, has kept from being written; None for an error of another kind."""
    if error is None:
        return None
    if isinstance(error, BaseExceptionGroup):
        return next((full for each in error.exceptions if (full := _full(each))), None)
    no_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if no_room or getattr(error, "sqlite_errorname", None) == "SQLITE_FULL":
        return str(error)
    return _full(error.__cause__)


class LogFile:
    """The log of one process, from its start on, in a file that it shares with earlier processes.

    The supervisor rotates the file: its content is copied to `<file>.1`, what was there before to `.2` up to
    `.<files>`, and the file itself is truncated, so that the process, which appends, needs to know nothing. No older
    file is larger than `limit` bytes, nor is the file after any `new_lines`. What comes during the copy stays in the
    file; lines written in the instant between the last look at its end and the truncation are lost.
    """

    def __init__(self, path: Path, limit: int, files: int) -> None:
        self.path = path
        self._limit, self._files = limit, files
        self._start = self._read = path.stat().st_size if path.exists() else 0
        self._start_in_older: int | None = None  # once it was rotated
        self._partial = b""

    def new_lines(self) -> list[str]:
        """Complete lines since the last call; of very many only the last."""
        if self.path.stat().st_size == self._read:
            return []
        with self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if rotates := end > self._limit - self._limit // 8:  # room for what comes between two looks
                data, end = self._rotate(file, end)
            else:
                file.seek(max(self._read, end - _TAIL_BYTES))
                data, end = file.read(_TAIL_BYTES), file.tell()
        if (unread := end - self._read) > len(data):
            self._partial = b"[...] "
        self._read = 0 if rotates else end
        *lines, self._partial = (self._partial + data[len(data) - min(unread, len(data)) :]).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def last_lines(self, name: str, count: int = _LAST_LINES) -> str:
        """The last lines of process `name`, joined to one for an error message."""
        data = _tail(self.path, self._start)
        if self._start_in_older is not None:
            data = _tail(older(self.path, 1), self._start_in_older) + data
        if self.disk_is_full:
            data += b"\n" + f"its disk is full: nothing can be written to {self.path.parent}".encode()
        shown = [part for line in data.decode(errors="replace").splitlines() for part in plain(line, name)]
        return " | ".join([shortened(line.strip()) for line in shown if line.strip()][-count:]) or "(it is empty)"

    @property
    def disk_is_full(self) -> bool:
        """Whether there is no room for another line to speak of, or for another file."""
        return shutil.disk_usage(self.path.parent).free < _LINE_ROOM or free_inodes(self.path.parent) == 0

    def _rotate(self, file: IO[bytes], end: int) -> tuple[bytes, int]:
        """Move the content of the file, up to its `end`, to the older ones. Returns its last bytes, and the position
        up to which it was moved."""
        tail, position = b"", file.seek(max(0, end - self._files * self._limit))
        for _ in range(self._files):
            shift(self.path, self._files)
            self._start_in_older = max(0, self._start - position)
            room = self._limit
            with older(self.path, 1).open("wb") as moved:
                while room and (piece := file.read(min(room, _TAIL_BYTES))):
                    moved.write(piece)
                    room, position, tail = room - len(piece), position + len(piece), (tail + piece)[-_TAIL_BYTES:]
            if room:
                break
        file.seek(max(position, file.seek(0, os.SEEK_END) - self._limit))
        meanwhile = file.read(self._limit)
        file.truncate(0)
        with self.path.open("ab") as again:
            again.write(meanwhile)
        self._start = 0
        return tail, position


def older(path: Path, number: int) -> Path:
    """The file of a log's older lines of this number; 1 has the newest."""
    return path.with_name(f"{path.name}.{number}")


def shift(path: Path, files: int) -> None:
    """Make room for a newest one of a log's older files, of which there may be so many."""
    for number in range(files, 1, -1):
        if older(path, number - 1).exists():
            older(path, number - 1).replace(older(path, number))


def shortened(line: str) -> str:
    return line[:_LINE_CHARS]


def _tail(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read()
