"""Logs and timelines of a remote worker on the head node: all of it, once, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.api.head import HeadNodeError
from areal_core.run.remote.files import append
from areal_core.run.remote.sending import Sender

LOG, TIMELINE = "logs/generation-0.log", "timeline/generation-0.jsonl"
OLDER = 3  # files of a log on the head node


class HeadFolder:
    """The head node's side. `breaks` says, of every call, whether its answer is lost."""

    def __init__(self, root: Path, *, limit: int = 2**20) -> None:
        self.root = root
        self.limit = limit
        self.breaks: Callable[[], bool] = lambda: False
        self.calls = 0
        for folder in ("logs", "timeline"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def append(self, name: str, offset: int, data: bytes) -> tuple[bool, int]:
        self.calls += 1
        older = OLDER if name == LOG else None
        answer = append(self.root / name, offset, data, limit=self.limit, older=older)
        if self.breaks():
            raise HeadNodeError("the connection broke")
        return answer

    def text(self, name: str) -> str:
        """Of a file and the older ones, in the order of writing."""
        file = self.root / name
        older = [file.with_name(f"{file.name}.{number}") for number in range(OLDER, 0, -1)]
        return "".join(path.read_text() for path in (*older, file) if path.exists())


class Machine:
    """A remote worker's folder."""

    def __init__(self, root: Path, head: HeadFolder) -> None:
        self.root, self.head = root, head
        for folder in ("logs", "timeline"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """A command of this folder."""
        self.sender = Sender(self.root, [LOG, TIMELINE], self.head.append, self.root / "sent.json")

    def write(self, name: str, text: str) -> None:
        with (self.root / name).open("a") as file:
            file.write(text)


@pytest.fixture
def head(tmp_path: Path) -> HeadFolder:
    return HeadFolder(tmp_path / "head")


@pytest.fixture
def machine(tmp_path: Path, head: HeadFolder) -> Machine:
    return Machine(tmp_path / "machine", head)


def write(text: str, machine: Machine) -> None:
    """To both files."""
    machine.write(LOG, text)
    machine.write(TIMELINE, text)


def test_whole_lines_come_as_they_are_written_and_the_rest_at_the_end(machine: Machine, head: HeadFolder) -> None:
    write("one\ntw", machine)
    machine.sender.send_new()
    assert head.text(LOG) == head.text(TIMELINE) == "one\n"
    machine.sender.send_new(last=True)
    assert head.text(LOG) == head.text(TIMELINE) == "one\ntw"


def test_a_machine_in_the_place_of_another_one(tmp_path: Path, machine: Machine, head: HeadFolder) -> None:
    """Its log and its timeline go on behind the other's. A long text goes in pieces."""
    write("of the first\n", machine)
    machine.sender.send_new(last=True)
    calls, second = head.calls, Machine(tmp_path / "second", head)
    text = "".join(f"{number}\n" for number in range(100_000))
    write(text, second)
    second.sender.send_new()
    assert head.text(LOG) == head.text(TIMELINE) == "of the first\n" + text
    assert head.calls - calls > 4


def test_the_head_node_rotates_a_log_that_would_get_too_large(machine: Machine, head: HeadFolder) -> None:
    """Though every second answer is lost."""
    head.limit, text = 100, ""
    answers = iter((True, False) * 100)
    head.breaks = lambda: next(answers)
    for number in range(20):
        machine.write(LOG, line := f"{number:02d} {'x' * 10}\n")
        text += line
        for _ in range(4):
            machine.sender.send_new()
    assert head.text(LOG) == text
    kept = sorted((head.root / LOG).parent.iterdir())
    assert [path.name for path in kept] == [f"generation-0.log{end}" for end in ("", ".1", ".2")]
    assert all(path.stat().st_size <= 100 for path in kept)


def test_a_head_node_that_has_lost_what_it_had(machine: Machine, head: HeadFolder) -> None:
    """It gets the timeline again, and of a log what comes then."""
    write("one\n", machine)
    machine.sender.send_new()
    (head.root / LOG).write_text("strange, and longer than that here\n")
    (head.root / TIMELINE).unlink()
    write("two\n", machine)
    machine.sender.send_new()
    machine.sender.send_new()
    assert (head.root / LOG).read_text() == "strange, and longer than that here\ntwo\n"
    assert (head.root / TIMELINE).read_text() == "one\ntwo\n"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4000)),
        st.tuples(st.sampled_from(("look", "lose", "rotate", "restart")), st.just(0)),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_whatever_happens_everything_is_there_once(steps: list[tuple[str, int]]) -> None:
    """As long as a log that is rotated has not grown again by the next look that is answered."""
    with TemporaryDirectory() as folder:
        head = HeadFolder(Path(folder) / "head")
        machine = Machine(Path(folder) / "machine", head)
        written = dict.fromkeys((LOG, TIMELINE), "")
        for what, size in steps:
            if what == "write":
                for name in written:
                    text = f"{len(written[name])} {'x' * size}\n"
                    machine.write(name, text)
                    written[name] += text
            elif what == "rotate" and machine.sender._sent.get(LOG, [0])[0]:
                (machine.root / LOG).replace(machine.root / f"{LOG}.1")
                (machine.root / LOG).touch()
                head.breaks = lambda: False
                machine.sender.send_new()
            elif what == "restart":
                machine.start()
            elif what in ("look", "lose"):
                answers = iter((False, True))
                head.breaks = (lambda answers=answers: next(answers, True)) if what == "lose" else lambda: False
                machine.sender.send_new()
        head.breaks = lambda: False
        machine.sender.send_new(last=True)
        assert head.text(TIMELINE) == written[TIMELINE]
        assert head.text(LOG) == written[LOG]
