"""Logs of a run: one format for every process, based on the `logging` package, in rotated files.

    2026-11-23T03:22:48.123Z WARNING trainer-1 [step 7] message

Time is UTC. A process calls `start` once. The supervisor passes the process's index in the environment. A process that
a person started has no supervisor. It writes bare messages, in the form that `plain` extracts from a line. Output of
native libraries and vLLM in the same file stays unchanged.
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

INDEX = "AREAL_INDEX"  # index of a process in its role; unset if a person started the process
LOG_BYTES, LOG_FILES = 16 * 2**20, 4  # size at which a log is rotated; number of rotated files to keep
_TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z ([A-Z]+) (\S+-\d+) (?:\[step \d+\] )?(.*)")
_TAIL_BYTES = 64 * 1024  # most new log bytes to read at once; older ones stay in the file
LINE_CHARS = 500  # longest line to show
_LAST_LINES = 6  # log lines in an error message

logger = logging.getLogger(__name__)
_step: int | None = None


def start(role: str, index: int | None = None) -> None:
    """Set up logging on stderr for this process. Warnings and uncaught exceptions become records as well.

    `index` is the index of this process in its role; None takes the supervisor's value from the environment.
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
    """Set the training step of the following lines, except lines that set their own (`extra={"step": k}`)."""
    global _step
    _step = step


class Journal:
    """Messages of the launcher itself: passed to `echo`, and kept in a log file of their own.
    A full disk does not stop `echo`."""

    def __init__(self, path: Path, name: str, echo: Callable[[str], None]) -> None:
        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
        handler.setFormatter(Formatter(name))
        handler.handleError = lambda record: None
        self._logger = logging.Logger(name)  # no parent logger, so the root's handlers get no records
        self._logger.addHandler(handler)
        self._echo = echo

    def __call__(self, line: str, level: int = logging.WARNING) -> None:
        """Log a line, by default as a warning, because a launcher reports mostly problems."""
        self._logger.log(level, "%s", line)
        self._echo(line)


class Formatter(logging.Formatter):
    """Formats log lines of the process `name`; with None, bare messages for a person."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """Format a record. Its message stays on one line, as it may quote a completion; a traceback does not."""
        message, step = record.getMessage(), getattr(record, "step", _step)
        text = printable(message) + printable_lines(super().format(record).removeprefix(message))
        if self._name is None:
            return _shown(record.levelname, text)
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        at = "" if step is None else f"[step {step}] "
        return f"{when} {record.levelname} {self._name} {at}{text}"


def plain(line: str, name: str) -> str:
    """The message of a log line of process `name`, as shown to a person.
    Marks errors, and names the process if it is another one. Lines of other formats stay unchanged."""
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
    """The log of one process from its start, in a file shared with earlier processes.

    The supervisor rotates the file. It copies the contents to `<file>.1`, after moving older ones to `.2` up to
    `.<LOG_FILES>`, and truncates the file. The process only appends, so it need not know. Lines written between the end
    of the copy and the truncation are lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self._read = path.stat().st_size if path.exists() else 0
        self._start_in_older: int | None = None  # set once the file was rotated
        self._partial = b""

    def new_lines(self) -> list[str]:
        """Complete lines since the last call; only the last ones if there are very many."""
        size, source = self.path.stat().st_size, self.path
        if size == self._read:
            return []
        if rotates := size > LOG_BYTES - LOG_BYTES // 8:  # leaves room for lines between two calls
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
        """The last lines of process `name`, joined to one line for an error message."""
        data, _ = _tail(self.path, self._start)
        if self._start_in_older is not None:
            data = _tail(older(self.path, 1), self._start_in_older)[0] + data
        shown = [plain(line, name) for line in data.decode(errors="replace").splitlines()]
        return " | ".join([line.strip()[:LINE_CHARS] for line in shown if line.strip()][-count:]) or "(it is empty)"


def older(path: Path, number: int) -> Path:
    """The rotated file with this number; 1 is the newest."""
    return path.with_name(f"{path.name}.{number}")


def shift(path: Path, files: int) -> None:
    """Rename rotated files to free number 1; `files` is the number of files to keep."""
    for number in range(files, 1, -1):
        if older(path, number - 1).exists():
            older(path, number - 1).replace(older(path, number))


def _tail(path: Path, start: int) -> tuple[bytes, int]:
    """The last bytes of a file, from `start` at the earliest, and their end offset."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read(), file.tell()
