"""Logs of a run: one format for every process, on top of the standard `logging` package, in files that are rotated.

    2026-11-23T03:22:48.123Z WARNING trainer-1 [step 7] message

Time is UTC. A process calls `start` once; its index comes from its supervisor, through the environment. One that a
person started has no supervisor, and writes messages alone, as `plain` extracts them from a line. What native libraries
and vLLM write into the same file stays as it is.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from areal_core.errors import printable, printable_lines

INDEX = "AREAL_INDEX"  # of a process in its role; unset: a person reads
LOG_BYTES, LOG_FILES = 16 * 2**20, 4  # of a log before it is rotated, and older ones that are kept of it
_TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z ([A-Z]+) (\S+-\d+) (?:\[step \d+\] )?(.*)")
_TAIL_BYTES = 64 * 1024  # of new log lines that are read at once; older ones stay in the file
_LINE_CHARS = 500
_LAST_LINES = 6  # of a log, in an error

logger = logging.getLogger(__name__)
_step: int | None = None


def start(role: str, index: int | None = None) -> None:
    """Set up the logging of this process, on stderr. Warnings and uncaught exceptions become records as well.

    `index`: of this process in its role; None: the one that its supervisor has put into the environment.
    """
    given = os.environ.get(INDEX)
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(None if given is None else f"{role}-{given if index is None else index}"))
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

    def __init__(self, path: Path, name: str, tell: Callable[[str], None]) -> None:
        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
        handler.setFormatter(Formatter(name))
        handler.handleError = lambda record: None
        self._logger = logging.Logger(name)  # without a parent: nothing goes on to the root's handlers
        self._logger.addHandler(handler)
        self._tell = tell

    def __call__(self, line: str, level: int = logging.WARNING) -> None:
        """A warning unless `level` says otherwise: a launcher reports what goes wrong."""
        self._logger.log(level, "%s", line)
        self._tell(line)


class Formatter(logging.Formatter):
    """Of the lines of a process of this name; None: messages alone, for a person."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """A message stays on one line, as it may quote a completion. A traceback keeps its lines."""
        message, step = record.getMessage(), getattr(record, "step", _step)
        text = printable(message) + printable_lines(super().format(record).removeprefix(message))
        if self._name is None:
            return _shown(record.levelname, text)
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        at = "" if step is None else f"[step {step}] "
        return f"{when} {record.levelname} {self._name} {at}{text}"


def plain(line: str, name: str) -> str:
    """The message of a line in the log of process `name`, as a person reads it: an error is marked as one, and the
    process is named where it is another one. A line of another format is returned as it is."""
    if (match := _TEXT_LINE.fullmatch(line)) is None:
        return line
    level, who, message = match.groups()
    shown = _shown(level, message)
    return shown if who == name else f"{who}: {shown}"


def _shown(level: str, message: str) -> str:
    return f"areal: error: {message}" if level in ("ERROR", "CRITICAL") else message


def _uncaught(kind: type[BaseException], error: BaseException | None, traceback: Any, where: str = "") -> None:
    if where or issubclass(kind, Exception):
        logger.critical("uncaught exception%s", where, exc_info=(kind, error or kind(), traceback))
    else:
        sys.__excepthook__(kind, error or kind(), traceback)


def _uncaught_in_thread(thrown: threading.ExceptHookArgs) -> None:
    where = f" in {thrown.thread.name if thrown.thread else 'a thread'}"
    _uncaught(thrown.exc_type, thrown.exc_value, thrown.exc_traceback, where)


class LogFile:
    """The log of one process, from its start on, in a file that it shares with earlier processes.

    The supervisor rotates the file: its content is copied to `<file>.1`, what was there before to `.2` up to
    `.<LOG_FILES>`, and the file itself is truncated, so that the process, which appends, needs to know nothing. Lines
    written in the instant between the end of the copy and the truncation are lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self._read = path.stat().st_size if path.exists() else 0
        self._start_in_older: int | None = None  # once it was rotated
        self._partial = b""

    def new_lines(self) -> list[str]:
        """Complete lines since the last call; of very many only the last."""
        size, source = self.path.stat().st_size, self.path
        if size == self._read:
            return []
        if rotates := size > LOG_BYTES - LOG_BYTES // 8:  # room for what comes between two looks
            source = older(self.path, 1)
            shift(self.path, LOG_FILES)
            shutil.copyfile(self.path, source)
            os.truncate(self.path, 0)
            self._start_in_older, self._start = self._start, 0
        data, end = _tail(source, self._read)
        if end - self._read > len(data):
            self._partial = b"[...] "
        self._read = 0 if rotates else end
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def last_lines(self, name: str, count: int = _LAST_LINES) -> str:
        """The last lines of process `name`, joined to one for an error message."""
        data, _ = _tail(self.path, self._start)
        if self._start_in_older is not None:
            data = _tail(older(self.path, 1), self._start_in_older)[0] + data
        shown = [plain(line, name) for line in data.decode(errors="replace").splitlines()]
        return " | ".join([shortened(line.strip()) for line in shown if line.strip()][-count:]) or "(it is empty)"


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


def _tail(path: Path, start: int) -> tuple[bytes, int]:
    """The last bytes of a file, none before `start`, and where they end."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read(), file.tell()
