"""Records and scores of an evaluation on one benchmark, its HTML page, and a comparison of two.

A file has one line per problem, with all rollouts of the problem. A completion here means the text that one rollout
sampled. The first line of a file holds the evaluated model and the settings. A reopened file is continued; an
incomplete last line is dropped.

Every completion counts. Truncated completions, completions without a readable answer and those without a result are
incorrect.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from areal_core.config.fields import leaves, shown
from areal_core.errors import ConfigError, StorageError, printable_lines
from areal_core.evaluation.statistics import Difference, Estimate, difference, estimate, majority_at_k, pass_at_k
from areal_core.types import Outcome, Sample

_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One problem of a benchmark, with its rollouts."""

    problem: int  # index in the benchmark
    prompt_id: str  # hash of its text
    prompt: str  # text of the prompt tokens, including special tokens
    gold: str
    greedy: Sample
    samples: tuple[Sample, ...]  # sampled completions, ordered by seed
    task: str = ""  # task in a mixture


class RecordFile:
    """The records of one evaluation on one benchmark; a context manager that closes the file.

    Lines from the first damaged one on are dropped. Raises ConfigError, naming the first field that differs, if the
    file belongs to another evaluation. Raises StorageError for a file that can't be read or written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # without an incomplete last line
            self._records: dict[int, Record] = {}
            whole = 0  # bytes before the first damaged line, which a power loss may leave
            with suppress(*_DAMAGED):
                for number, line in enumerate(lines):
                    if number == 0:
                        self._check(line, about)
                    else:
                        record = msgspec.json.decode(line, type=Record)
                        self._records[record.problem] = record
                    whole += len(line) + 1
            self._file = path.open("ab")
            self._file.truncate(whole)
            if not whole:
                self._write(about)
        except OSError as error:
            raise StorageError(f"{path}: can't read or write records: {error}") from error

    def __contains__(self, problem: int) -> bool:
        return problem in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> list[Record]:
        """All records, ordered by problem."""
        return [self._records[problem] for problem in sorted(self._records)]

    def add(self, record: Record) -> None:
        """Append a record. Raises StorageError."""
        try:
            self._write(record)
        except OSError as error:
            raise StorageError(f"{self.path}: can't write records: {error.strerror}") from error
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
                wanted = f"{shown(before.get(name))} as in the records of {self.path}"
                advice = "use the value of the records, or choose another --name"
                raise ConfigError(f"{name}: must be {wanted}, got {shown(now.get(name))}; {advice}")

    def _write(self, value: Record | Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(value) + b"\n")
        self._file.flush()


def read_records(path: Path) -> list[Record]:
    """The complete records of a file, ordered by problem. Raises StorageError."""
    try:
        lines = path.read_bytes().split(b"\n")[1:-1]
        return sorted((msgspec.json.decode(line, type=Record) for line in lines), key=lambda record: record.problem)
    except (OSError, *_DAMAGED) as error:
        raise StorageError(f"{path}: can't read records: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of a benchmark, as means over problems."""

    problems: int
    samples: int  # samples per problem, in addition to the greedy completion
    greedy: Estimate
    pass_at: Mapping[int, Estimate]  # by k: 1, 2, 4, ...
    majority_at: Mapping[int, Estimate]  # by k > 2
    outcomes: Mapping[Outcome, int]  # number of completions by outcome
    truncated: int  # completions that reached the length limit
    mean_tokens: float  # mean length of all completions
    means: Mapping[str, float]  # environment metrics, over greedy completions that have them
    of_tasks: Mapping[str, float]  # greedy accuracy of each task of a mixture

    @property
    def completions(self) -> int:
        return sum(self.outcomes.values())

    def metrics(self) -> dict[str, float]:
        """Metric names and values, for curves."""
        estimates = {
            "greedy": self.greedy,
            **{f"pass_at_{k}": value for k, value in self.pass_at.items()},
            **{f"majority_at_{k}": value for k, value in self.majority_at.items()},
        }
        return {
            **{name: value.value for name, value in estimates.items()},
            **{f"{name}_low": value.low for name, value in estimates.items()},
            **{f"{name}_high": value.high for name, value in estimates.items()},
            **{f"outcome_{outcome}": self.outcomes.get(outcome, 0) / self.completions for outcome in Outcome},
            "truncated": self.truncated / self.completions,
            "mean_tokens": self.mean_tokens,
            **self.means,
            **{f"greedy/{task}": value for task, value in self.of_tasks.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Names and values as text, for people."""
        found = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in self.outcomes.items())
        return [
            ("problems", f"{self.problems:,}"),
            ("greedy", _shown(self.greedy)),
            *((f"pass@{k}, {self.samples} samples", _shown(value)) for k, value in self.pass_at.items()),
            *((f"maj@{k}, {self.samples} samples", _shown(value)) for k, value in self.majority_at.items()),
            ("completions", f"{found}; {self.truncated} truncated; {self.mean_tokens:,.0f} tokens on average"),
            *((name, f"{value:.3g}") for name, value in self.means.items()),
            *((f"greedy, {task}", f"{value:.3f}") for task, value in self.of_tasks.items()),
        ]


def scored(records: Sequence[Record]) -> Scores:
    """The scores of one or more records with equal numbers of samples."""
    samples = len(records[0].samples)
    everything = [sample for record in records for sample in (record.greedy, *record.samples)]
    outcomes = Counter(sample.outcome for sample in everything)
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.greedy.metrics.items():
            numbers[name].append(value)
    tasks = dict.fromkeys(record.task for record in records if record.task)  # none outside of a mixture
    powers = [2**exponent for exponent in range(samples.bit_length())]  # 1, 2, 4, ... up to the number of samples
    return Scores(
        problems=len(records),
        samples=samples,
        greedy=estimate(_correct(records)),
        pass_at={k: estimate(_pass_at(records, k)) for k in powers},
        majority_at={k: value for k in powers if k > 2 and (value := _majority_at(records, k))},
        outcomes={outcome: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        truncated=sum(sample.truncated for sample in everything),
        mean_tokens=sum(sample.tokens for sample in everything) / len(everything),
        means={name: sum(values) / len(values) for name, values in numbers.items()},
        of_tasks={task: float(_correct([each for each in records if each.task == task]).mean()) for task in tasks},
    )


def compared(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Difference]:
    """Score differences of two models on the same problems: `greedy`, and `pass_at_1` if both have it.
    Raises ConfigError if the problems differ."""
    if [record.prompt_id for record in records] != [record.prompt_id for record in reference]:
        raise ConfigError(
            "reference: must have the same problems as this evaluation; use equal data and settings for both"
        )
    found = {"greedy": difference(_correct(records), _correct(reference))}
    if all(record.samples for record in (*records, *reference)):
        found["pass_at_1"] = difference(_pass_at(records, 1), _pass_at(reference, 1))
    return found


def problem_row(record: Record) -> dict[str, Any]:
    """A problem as a row of a table for people."""
    return {
        "problem": record.problem,
        "prompt": record.prompt,
        "gold": record.gold,
        "greedy": record.greedy.text,
        "verdict": record.greedy.outcome,
        "answer": record.greedy.answer,
        "tokens": record.greedy.tokens,
        "cut off": record.greedy.truncated,
        "samples": len(record.samples),
        "samples correct": sum(sample.correct for sample in record.samples),
    }


def _correct(records: Sequence[Record]) -> NDArray[np.float64]:
    """Whether the greedy completion of each problem is correct: 1 or 0, shape [P]."""
    return np.array([float(record.greedy.correct) for record in records])


def _pass_at(records: Sequence[Record], k: int) -> NDArray[np.float64]:
    """pass@k of each problem, shape [P]."""
    correct = np.array([sum(sample.correct for sample in record.samples) for record in records])
    return pass_at_k(correct, np.array([len(record.samples) for record in records]), k)


def _majority_at(records: Sequence[Record], k: int) -> Estimate | None:
    """maj@k, with one vote per readable answer text; None if no answer was readable."""
    if not any(sample.answer for record in records for sample in record.samples):
        return None
    votes = [
        ([s.answer for s in record.samples], {s.answer for s in record.samples if s.correct and s.answer})
        for record in records
    ]
    return estimate(np.array([majority_at_k(answers, correct, k) for answers, correct in votes]))


def _shown(value: Estimate) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


_SAMPLES = 8  # most samples of a problem on the page


def _finalized(value: object) -> object:
    """Escape control characters and text-direction marks in texts; tabs stay."""
    return "\t".join(map(printable_lines, value.split("\t"))) if type(value) is str else value


_JINJA = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalized)
_TEMPLATE = _JINJA.from_string(Path(__file__).with_name("page.html").read_text())


def write_page(path: Path, title: str, records: Sequence[Record], scores: Scores) -> None:
    """Write the HTML page of an evaluation. Raises StorageError if the file can't be written."""
    found = {record.greedy.outcome for record in records}
    text = _TEMPLATE.render(
        title=title,
        figures=scores.rows(),
        outcomes=[outcome for outcome in Outcome if outcome in found],
        records=records,
        most=_SAMPLES,
    )
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"{path}: can't write it: {error.strerror}") from error
