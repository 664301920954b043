"""What became of the rows of a task's files: how many are prompts, and what the others are left out for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a row is no prompt, as it is said of many: "12 too long"."""

    UNREADABLE = "unreadable"
    NO_PROMPT = "without prompt"
    NO_ANSWER = "without answer"
    NO_RATE = "without success rate"
    UNSPELLABLE = "unspellable"
    TOO_LONG = "too long"
    # of training files alone, and nothing that is wrong with a row:
    TOO_SHORT = "too short"
    DUPLICATE = "duplicate"
    OVERLAPPING = "overlapping with held-out prompts"
    TOO_HARD = "too hard"
    TOO_EASY = "too easy"

    @property
    def is_bad(self) -> bool:
        """Whether such a row is a mistake in its file, which task.bad_rows=refuse refuses."""
        return self not in _FILTERED


_FILTERED = {Reason.TOO_SHORT, Reason.DUPLICATE, Reason.OVERLAPPING, Reason.TOO_HARD, Reason.TOO_EASY}


class LeftOut(Exception):  # noqa: N818 - what becomes of a row, not of a run
    """A row is no prompt. The message says what is wrong with it, if anything is."""

    def __init__(self, reason: Reason, said: str = "") -> None:
        super().__init__(said)
        self.reason = reason


@dataclass(slots=True)
class FileReport:
    """The rows of one file."""

    path: str
    rows: int = 0  # empty lines are none
    prompts: int = 0
    left_out: dict[Reason, int] = field(default_factory=dict)  # rows - prompts in all
    bad: list[str] = field(default_factory=list)  # bad rows as they come, the first few: place, and what is wrong

    def leave_out(self, reason: Reason, count: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count

    def __str__(self) -> str:
        """One line: "train.jsonl: 7,473 rows: 7,401 prompts; left out: 72 duplicate"."""
        parts = [f"{self.path}: {self.rows:,} rows: {self.prompts:,} prompts"]
        if self.left_out:
            parts.append("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items()))
        parts += self.bad
        if sum(count for reason, count in self.left_out.items() if reason.is_bad) > len(self.bad):
            parts.append("...")
        return "; ".join(parts)


@dataclass(slots=True)
class DatasetReport:
    """The rows of a task's files."""

    training: FileReport | None  # None: there is nothing to train on
    held_out: FileReport
