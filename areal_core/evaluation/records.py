"""Records of an evaluation: a line for every problem, with all of its completions and their verdicts.

The first line says what was evaluated, and how. A file that is opened again goes on where it ended; a line that was cut
off by the end of its process is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from areal_core.config.fields import leaves
from areal_core.errors import ConfigError, StorageError
from areal_core.types import Outcome

_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion and its verdict."""

    text: str
    tokens: int
    truncated: bool  # it ran into the length limit
    outcome: Outcome
    score: float | None  # None: there is no result
    answer: str | None  # what the verifier has read

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One problem of a benchmark."""

    problem: int  # its place in the benchmark
    prompt_id: str  # hash of its text
    prompt: str  # as it was fed, special tokens included
    gold: str
    greedy: Sample
    samples: tuple[Sample, ...]  # sampled ones, in the order of their seeds


class RecordFile:
    """The records of one evaluation on one benchmark. A context that closes the file.

    Raises ConfigError, naming the first field that differs, where a file holds records of another evaluation;
    StorageError for one that can't be read or written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, synced: bool = True) -> None:
        """`synced`: a record outlives the machine as soon as it is added; else the process, and a file that the machine
        has not left whole is begun anew."""
        self.path = path
        self._synced = synced
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # without a line that was cut off
            try:
                if whole:
                    self._check(whole[0], about)
                self._records = _decoded(whole)
            except _DAMAGED:
                if synced:
                    raise
                whole, self._records = [], {}
            self._file = path.open("ab")
            self._file.truncate(sum(len(line) + 1 for line in whole))
            if not whole:
                self._write(about)
        except (OSError, *_DAMAGED) as error:
            raise StorageError(f"{path}: can't be read or written as records: {error}") from error

    def __contains__(self, problem: int) -> bool:
        return problem in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> list[Record]:
        """In the order of their problems."""
        return [self._records[problem] for problem in sorted(self._records)]

    def add(self, record: Record) -> None:
        """Write a record."""
        try:
            self._write(record)
        except OSError as error:
            raise StorageError(f"{self.path}: can't be written: {error.strerror}") from error
        self._records[record.problem] = record

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check(self, line: bytes, about: Mapping[str, Any]) -> None:
        kind = dict[str, Any]
        before, now = (dict(leaves(msgspec.json.decode(each, type=kind))) for each in (line, orjson.dumps(about)))
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise ConfigError(
                    f"{name}: {self.path} holds records with {before.get(name)!r}, got {now.get(name)!r}; "
                    "another --name keeps both"
                )

    def _write(self, value: Record | Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(value) + b"\n")
        self._file.flush()
        if self._synced:
            os.fsync(self._file.fileno())


def read_records(path: Path) -> list[Record]:
    """The whole records of a file, in the order of their problems. Raises StorageError."""
    try:
        records = _decoded(path.read_bytes().split(b"\n")[:-1])
    except (OSError, *_DAMAGED) as error:
        raise StorageError(f"{path}: can't be read as records: {error}") from error
    return [records[problem] for problem in sorted(records)]


def _decoded(lines: Sequence[bytes]) -> dict[int, Record]:
    """Records by problem, from the whole lines of a file."""
    records = (msgspec.json.decode(line, type=Record) for line in lines[1:])
    return {record.problem: record for record in records}
