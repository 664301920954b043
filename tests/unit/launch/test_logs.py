"""The format of a run's logs, what a person is shown of them, and their rotation."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.launch import logs
from areal_core.launch.logs import INDEX, Journal, LogFile, plain

SAID = """
import logging, os, threading, warnings
from areal_core.launch import logs
logger = logging.getLogger("areal_core.anything")
logs.start("trainer")
{code}
"""


def record(message: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("areal_core.x", level, __file__, 1, message, args, None)


def said(code: str, index: str | None) -> tuple[int, list[str]]:
    """Exit status of a process, which has this index from its supervisor, and the lines of its stderr."""
    clean = {name: value for name, value in os.environ.items() if name != INDEX}
    chosen = {} if index is None else {INDEX: index}
    command = [sys.executable, "-c", SAID.format(code=code)]
    done = subprocess.run(command, env=clean | chosen, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()


HOSTILE = "\x1b]0;owned\x07\r\n2026-11-23T03:22:48.123Z INFO controller-0 forged \u202e"


@pytest.mark.parametrize("name", ["evaluator-0", None])
def test_hostile_text_forges_no_line_and_no_terminal_command(name: str | None) -> None:
    """The text of a verifier's exception may quote a completion."""
    shown = logs.Formatter(name)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        failed = record("the verifier failed: %s", error)
        failed.exc_info = (ValueError, error, error.__traceback__)
    for line in shown.format(failed).splitlines():
        assert not {"\x1b", "\r", "\x07", "\u202e"} & set(line)
    message = plain(shown.format(record("failed: %s", HOSTILE)), "evaluator-0")
    assert message.startswith(r"failed: \x1b]0;owned\x07\r\n2026")


def test_a_launcher_keeps_what_it_says_and_says_it_all_the_same_where_its_disk_is_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "trainer-0 exited with code 1: restart 1 of 2"
    for path in (tmp_path / "l.log", Path("/dev/full")):
        Journal(path, "launcher-0", print)(line)
    assert capfd.readouterr() == (f"{line}\n{line}\n", "")
    assert (tmp_path / "l.log").read_text().endswith(f"Z WARNING launcher-0 {line}\n")


def test_a_process_knows_its_index_and_an_uncaught_exception_is_a_record_too() -> None:
    code = (
        "logger.info('here'); logs.at_step(4); logger.warning('there'); os.write(2, b'native\\n')\n"
        "thread = threading.Thread(target=lambda: [][1], name='reader'); thread.start(); thread.join()\n"
        "warnings.warn('deprecated')\n"
        "raise ValueError('no luck')"
    )
    status, text = said(code, "2")
    assert (status, text[-1]) == (1, "ValueError: no luck")
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO trainer-2 here$", text[0])
    assert text[1].endswith("Z WARNING trainer-2 [step 4] there")
    assert [plain(line, "controller-0") for line in text[:3]] == ["trainer-2: here", "trainer-2: there", "native"]
    assert "IndexError: list index out of range" in text
    records = [line.partition(" ")[2] for line in text if " trainer-2 [step 4] " in line][1:]
    assert records[0] == "CRITICAL trainer-2 [step 4] uncaught exception in reader"
    assert records[1].startswith("WARNING ")
    assert "deprecated" in records[1]
    assert records[2].startswith("CRITICAL ")
    by_hand = said("logger.info('here'); logger.error('port taken')", None)[1]  # the message alone
    assert by_hand == ["here", "areal: error: port taken"]


class Written:
    """A log that is appended to, and its LogFile."""

    def __init__(self, folder: Path, *, before: bytes = b"") -> None:
        self.path = folder / "x.log"
        self.path.write_bytes(before)
        self.log = LogFile(self.path)

    def write(self, *lines: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))


def numbered(first: int, last: int) -> list[bytes]:
    return [b"line %03d" % number for number in range(first, last)]  # nine bytes with its end


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    monkeypatch.setattr(logs, "LOG_FILES", 2)


def test_rotation_forwards_each_line_once_and_keeps_the_newest_files(tmp_path: Path) -> None:
    written, seen = Written(tmp_path), []
    for first in range(0, 500, 50):
        written.write(*numbered(first, first + 50))
        seen += written.log.new_lines()
    assert seen == [line.decode() for line in numbered(0, 500)]
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert [file.name for file in files] == ["x.log.2", "x.log.1", "x.log"]
    assert b"".join(file.read_bytes() for file in files) == b"".join(line + b"\n" for line in numbered(300, 500))


def test_a_line_that_was_cut_by_a_rotation_is_forwarded_whole(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.path.write_bytes(b"x" * 950 + b"\nhalf of ")
    assert written.log.new_lines() == ["x" * 950]
    written.write(b"a line")
    assert written.log.new_lines() == ["half of a line"]
    assert written.path.read_bytes() == b"a line\n"


def test_of_very_many_lines_the_last_are_forwarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come just before the copy are among them: of a process that ends, the last line says why."""
    monkeypatch.setattr(logs, "_TAIL_BYTES", 27)
    written, shift = Written(tmp_path), logs.shift
    written.write(*numbered(0, 999))
    monkeypatch.setattr(logs, "shift", lambda *given: (written.write(b"no luck!"), shift(*given)))
    assert written.log.new_lines() == ["[...] line 997", "line 998", "no luck!"]
    assert written.log.last_lines("x-0").endswith("line 998 | no luck!")


def test_last_lines_are_messages_of_this_process_alone_also_across_a_rotation(tmp_path: Path) -> None:
    written = Written(tmp_path, before=b"of an earlier one\n" * 20)
    assert written.log.last_lines("x-0") == "(it is empty)"
    written.write(*numbered(0, 100))
    written.log.new_lines()
    assert written.path.read_bytes() == b""
    written.write(logs.Formatter("x-0").format(record("no luck", level=logging.ERROR)).encode())
    last = "line 095 | line 096 | line 097 | line 098 | line 099 | areal: error: no luck"
    assert written.log.last_lines("x-0") == last
    assert written.log.last_lines("x-0", count=200).startswith("line 000 | ")
