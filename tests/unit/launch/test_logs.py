"""The format of a run's logs, what a person is shown of them, and their rotation."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.config.schema import LaunchConfig
from areal_core.launch import logs
from areal_core.launch.logs import FORMAT, INDEX, Journal, LogFile, Source, plain

CLOCK = 1795404168.123456  # 2026-11-23T03:22:48 UTC
SAID = """
import logging, os, threading, warnings
from areal_core.launch import logs
logger = logging.getLogger("areal_core.anything")
logs.start({role!r})
{code}
"""


def record(message: str = "loss %s", *args: object, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("areal_core.x", level, __file__, 1, message, args, None)
    made.created = CLOCK
    made.__dict__.update(extra)
    return made


def said(code: str, log_format: str | None, role: str = "trainer", **environment: str) -> tuple[int, list[str]]:
    """Exit status of a process, and the lines of its stderr."""
    clean = {name: value for name, value in os.environ.items() if name not in (FORMAT, INDEX, "RANK")}
    chosen = {} if log_format is None else {FORMAT: log_format}
    command = [sys.executable, "-c", SAID.format(role=role, code=code)]
    done = subprocess.run(command, env=clean | chosen | environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()


def test_record_becomes_a_line_of_text_or_json() -> None:
    text = logs.Formatter("text", Source("trainer", 1))
    assert text.format(record("loss %s", 0.5)) == "2026-11-23T03:22:48.123Z INFO trainer-1 loss 0.5"
    with_step = text.format(record("slow", level=logging.WARNING, step=7))
    assert with_step == "2026-11-23T03:22:48.123Z WARNING trainer-1 [step 7] slow"
    known = {"time": "2026-11-23T03:22:48.123Z", "level": "INFO", "role": "trainer", "index": 1, "rank": 1, "step": 7}
    made = logs.Formatter("json", Source("trainer", 1, 1)).format(record('"%s"\n', "x", step=7))
    assert json.loads(made) == {**known, "message": '"x"\n'}


HOSTILE = "\x1b]0;owned\x07\r\n2026-11-23T03:22:48.123Z INFO controller-0 forged \u202e"


@pytest.mark.parametrize("log_format", ["text", "json", None])
def test_hostile_text_forges_no_line_and_no_terminal_command(log_format: str | None) -> None:
    """The text of a verifier's exception may quote a completion."""
    shown = logs.Formatter(log_format, Source("evaluator"))
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        failed = record("the verifier failed: %s", error)
        failed.exc_info = (ValueError, error, error.__traceback__)
    for line in shown.format(failed).splitlines():
        for seen in [line, *plain(line, "evaluator-0")]:
            assert not {"\x1b", "\r", "\x07", "\u202e"} & set(seen)
    [message] = plain(shown.format(record("failed: %s", HOSTILE)), "evaluator-0")
    assert message.startswith(r"failed: \x1b]0;owned\x07\r\n2026")


@pytest.mark.parametrize(
    "line", ["", "some talk", "{}", '{"time": 1}', '{"time": "half of a li', "2026-11-23 INFO trainer-0 x"]
)
def test_what_others_write_is_shown_as_it_came(line: str) -> None:
    assert plain(line, "trainer-0") == [line]


def test_a_process_knows_its_format_and_index_from_its_supervisor() -> None:
    code = "logger.info('here'); logs.at_step(4); logger.warning('there'); os.write(2, b'native\\n')"
    _, text = said(code, "text", **{INDEX: "2"})
    assert [line.partition(" ")[2] for line in text[:2]] == ["INFO trainer-2 here", "WARNING trainer-2 [step 4] there"]
    assert text[2:] == ["native"]
    _, lines = said(code, "json", **{INDEX: "2", "RANK": "2"})
    assert [json.loads(line).get("step") for line in lines[:2]] == [None, 4]
    assert json.loads(lines[0])["rank"] == 2
    by_hand = said("logger.info('here'); logger.error('port taken')", None)[1]  # the message alone
    assert by_hand == ["here", "areal: error: port taken"]


def test_an_uncaught_exception_is_a_record_too() -> None:
    code = (
        "warnings.warn('deprecated')\n"
        "thread = threading.Thread(target=lambda: [][1], name='reader'); thread.start(); thread.join()\n"
        "raise ValueError('no luck')"
    )
    status, lines = said(code, "json")
    warned, in_thread, in_main = map(json.loads, lines)
    assert status == 1
    assert (warned["level"], "deprecated" in warned["message"]) == ("WARNING", True)
    assert "reader" in in_thread["message"]
    assert in_thread["traceback"].endswith("IndexError: list index out of range")
    assert in_main["traceback"].endswith("ValueError: no luck")
    assert plain(lines[2], "trainer-0")[-1] == "ValueError: no luck"


@pytest.mark.parametrize(
    ("code", "said_last"),
    [
        pytest.param(
            "raise ExceptionGroup('tasks', [ValueError('x'), OSError(errno.ENOSPC, 'No space left on device', 'a/b')])",
            "a disk is full: [Errno 28] No space left on device: 'a/b'",
            id="os",
        ),
        pytest.param(
            "database = sqlite3.connect(':memory:'); database.execute('PRAGMA max_page_count = 2')\n"
            "database.execute('CREATE TABLE t (x)'); database.execute('INSERT INTO t VALUES (zeroblob(99999))')",
            "a disk is full: database or disk is full",
            id="sqlite",
        ),
        pytest.param(
            "def write(): raise OSError(errno.EDQUOT, 'Disk quota exceeded')\n"
            "thread = threading.Thread(target=write, name='writer'); thread.start(); thread.join(); sys.exit(1)",
            "a disk is full, in writer: [Errno 122] Disk quota exceeded",
            id="thread",
        ),
    ],
)
def test_a_full_disk_is_one_line(code: str, said_last: str) -> None:
    status, lines = said(f"import errno, sqlite3, sys\n{code}", "text")
    assert status == 1
    assert [plain(line, "trainer-0") for line in lines] == [[f"areal: error: {said_last}"]]


def test_a_launcher_keeps_what_it_says_and_says_it_all_the_same_where_its_disk_is_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "trainer-0 exited with code 1: restart 1 of 2"
    for path in (tmp_path / "l.log", Path("/dev/full")):
        Journal(path, LaunchConfig(log_format="json"), Source("launcher"), print)(line)
    assert capfd.readouterr() == (f"{line}\n{line}\n", "")
    kept = json.loads((tmp_path / "l.log").read_text())
    assert (kept["role"], kept["level"], kept["message"]) == ("launcher", "WARNING", line)


class Written:
    """A log that is appended to, and its LogFile."""

    def __init__(self, folder: Path, *, limit: int, files: int, before: bytes = b"") -> None:
        self.path = folder / "x.log"
        self.path.write_bytes(before)
        self.log = LogFile(self.path, limit, files)

    def write(self, *lines: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))

    def older(self, number: int) -> bytes:
        return self.path.with_name(f"x.log.{number}").read_bytes()

    def names(self) -> list[str]:
        return sorted(file.name for file in self.path.parent.iterdir())


def numbered(first: int, last: int) -> list[bytes]:
    return [b"line %03d" % number for number in range(first, last)]  # nine bytes with its end


@pytest.mark.parametrize(("limit", "lines"), [(1000, 50), (100_000, 4500)])
def test_rotation_loses_no_line_and_forwards_each_once(tmp_path: Path, limit: int, lines: int) -> None:
    written, seen = Written(tmp_path, limit=limit, files=9), []
    for first in range(0, 10 * lines, lines):
        written.write(*numbered(first, first + lines))
        seen += written.log.new_lines()
    assert seen == [line.decode() for line in numbered(0, 10 * lines)]
    kept = [written.older(number) for number in range(len(written.names()) - 1, 0, -1)]
    everything = b"".join(line + b"\n" for line in numbered(0, 10 * lines))
    assert b"".join(kept) + written.path.read_bytes() == everything
    assert len(kept) >= 4
    assert all(len(one) <= limit for one in kept)


def test_a_line_that_was_cut_by_a_rotation_is_forwarded_whole(tmp_path: Path) -> None:
    written = Written(tmp_path, limit=1000, files=2)
    written.path.write_bytes(b"x" * 950 + b"\nhalf of ")
    assert written.log.new_lines() == ["x" * 950]
    written.write(b"a line")
    assert written.log.new_lines() == ["half of a line"]
    assert written.path.read_bytes() == b"a line\n"


def test_oldest_lines_go_when_all_files_are_full(tmp_path: Path) -> None:
    written = Written(tmp_path, limit=900, files=2)
    for first, last in ((0, 50), (50, 999)):
        written.write(*numbered(first, last))
        assert written.log.new_lines()[-1] == f"line {last - 1:03d}"
    assert written.names() == ["x.log", "x.log.1", "x.log.2"]
    assert written.older(2) + written.older(1) == b"".join(line + b"\n" for line in numbered(799, 999))
    assert written.path.read_bytes() == b""


def test_lines_that_come_while_the_rest_is_copied_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that has told much and ends, the last line says why."""
    written = Written(tmp_path, limit=900, files=2)
    written.write(*numbered(0, 999))
    shift = logs.shift

    def shifted(path: Path, files: int) -> None:
        written.write(b"no luck")
        monkeypatch.setattr(logs, "shift", shift)

    monkeypatch.setattr(logs, "shift", shifted)
    lines = written.log.new_lines() + written.log.new_lines()
    assert lines[-2:] == ["line 998", "no luck"]
    assert written.log.last_lines("x-0").endswith("line 998 | no luck")


def test_last_lines_are_messages_also_across_a_rotation(tmp_path: Path) -> None:
    written = Written(tmp_path, limit=1000, files=2)
    written.write(*numbered(0, 100))
    written.log.new_lines()
    written.write(logs.Formatter("json", Source("x")).format(record("no luck", level=logging.ERROR)).encode())
    last = "line 095 | line 096 | line 097 | line 098 | line 099 | areal: error: no luck"
    assert written.log.last_lines("x-0") == last


def test_the_last_lines_are_of_this_process_alone(tmp_path: Path) -> None:
    before = b"of an earlier one\n" * 50
    written = Written(tmp_path, limit=1000, files=2, before=before)
    assert written.log.last_lines("x-0") == "(it is empty)"
    written.write(b"mine")
    assert written.log.last_lines("x-0") == "mine"
    written.log.new_lines()
    assert written.older(1) == before + b"mine\n"
    assert written.log.last_lines("x-0") == "mine"
