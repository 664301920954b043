"""Prompts from the rows of two files: one to train on, and a held-out one.

    file -> rows -> prompts, gold answers and tokens, and a report of all other rows

`rows` reads files and interprets their fields. A `PromptFile` converts one file to prompts, and counts all other rows
by reason. Valid training rows are also left out if they repeat others or overlap with held-out prompts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from areal_core.config.groups import TaskConfig
from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import prompts_digest
from areal_core.environments.dialogue import Dialogue, as_text
from areal_core.environments.registry import verifier_name
from areal_core.environments.rows import Row, Schema, plain, read_rows
from areal_core.errors import ConfigError, ModelError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt


class Reason(StrEnum):
    """Why rows were left out, worded for a count: "12 too long"."""

    UNREADABLE = "unreadable"
    NO_PROMPT = "without prompt"
    NO_ANSWER = "without answer"
    UNENCODABLE = "not encodable"
    TOO_LONG = "too long"
    # only for training files, and no fault of a row:
    DUPLICATE = "duplicate"
    OVERLAPPING = "overlapping with held-out prompts"

    @property
    def is_bad(self) -> bool:
        """Whether such a row is an error in its file."""
        return self not in (Reason.DUPLICATE, Reason.OVERLAPPING)


class RowSkipped(Exception):  # noqa: N818 - concerns a row, not the run
    """A row was left out. The message describes its fault, if it has one."""

    def __init__(self, reason: Reason, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class FileReport:
    """Counts of the rows of one file."""

    path: str
    rows: int = 0  # without empty lines
    prompts: int = 0
    left_out: dict[Reason, int] = field(default_factory=dict)  # sums to rows - prompts
    bad: list[str] = field(default_factory=list)  # the first few bad rows: place and fault

    def leave_out(self, reason: Reason, count: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count

    def __str__(self) -> str:
        """Format as one line: "train.jsonl: 7,473 rows: 7,401 prompts; left out: 72 duplicate"."""
        parts = [f"{self.path}: {self.rows:,} rows: {self.prompts:,} prompts"]
        if self.left_out:
            parts.append("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items()))
        parts += self.bad
        if sum(count for reason, count in self.left_out.items() if reason.is_bad) > len(self.bad):
            parts.append("...")
        return "; ".join(parts)


@dataclass(slots=True)
class DatasetReport:
    """Reports of a task's files."""

    training: FileReport | None  # None: the task has no training file
    held_out: FileReport


_RUN = 13  # words
_COMMON = 10  # most texts that share a run of words; beyond it, the run is an idiom
_PUNCTUATION = re.compile(r"[^\w\s]")


def normalised(text: str) -> str:
    """Normalise case and white space, so that texts that differ only in these compare equal."""
    return " ".join(text.casefold().split())


def overlapping(texts: Sequence[str], reserved: Iterable[str]) -> list[bool]:
    """Whether each of `texts` equals one of `reserved`, or shares a run of 13 words with one.

    Ignores case and punctuation. Brown et al., 2020 (GPT-3, appendix C), searched their training data for test data
    this way. As there, a run that more than ten of `texts` have does not count: it is an idiom, or the file's own
    wording."""
    reserved = list(reserved)
    equals, runs = set(map(normalised, reserved)), {run for text in reserved for run in _runs(text)}
    shared = [runs.intersection(_runs(text)) for text in texts]
    having = Counter(run for found in shared for run in found)
    return [
        normalised(text) in equals or any(having[run] <= _COMMON for run in found)
        for text, found in zip(texts, shared, strict=True)
    ]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = _PUNCTUATION.sub("", text.casefold()).split()
    return zip(*(words[start:] for start in range(_RUN)), strict=False)


logger = logging.getLogger(__name__)

_NAMED = 3  # bad rows named in the log and the dataset report


class PromptFile:
    """The prompts of the training or the held-out file, which is read completely.

    Duplicates are removed from a training file, not from a held-out one. Raises ConfigError, with the name of the
    setting, if the file can't be read.
    """

    def __init__(self, task: TaskConfig, schema: Schema, dialogue: Dialogue, *, held_out: bool) -> None:
        self._name, path = ("task.held_out_path", task.held_out_path) if held_out else ("task.path", task.path)
        assert path is not None  # config.load ensures this for the held-out file
        self._report = FileReport(path)
        self._task, self._schema, self._dialogue, self._held_out = task, schema, dialogue, held_out
        self._seen: set[bytes] = set()  # hashes of prompt texts with gold answers
        self.prompts: list[Prompt] = []
        self.questions: list[str] = []  # prompt texts without the prompt template
        for row in read_rows(self._name, path):
            self._report.rows += 1
            try:
                self._add(row)
            except RowSkipped as found:
                self._report.leave_out(found.reason)
                if found.reason.is_bad and len(self._report.bad) < _NAMED:
                    self._report.bad.append(f"{row.place}: {found}")

    def leave_out_overlapping(self, reserved: Iterable[str]) -> None:
        """Leave out prompts that equal one of these texts, or share a run of words with one."""
        overlaps = overlapping(self.questions, reserved)
        if any(overlaps):
            self._report.leave_out(Reason.OVERLAPPING, sum(overlaps))
        self.prompts = [prompt for prompt, overlaps in zip(self.prompts, overlaps, strict=True) if not overlaps]

    def close(self) -> FileReport:
        """Log the report of the file in one line. Raises ConfigError if the file has no prompt."""
        report = self._report
        report.prompts = len(self.prompts)
        if not self.prompts:
            raise ConfigError(f"{self._name}: no usable prompt in {report}")
        logger.log(logging.WARNING if report.bad else logging.INFO, "%s: %s", self._name, report)
        return report

    def _add(self, row: Row) -> None:
        """Add the prompt of a row, or raise RowSkipped.
        Cheap checks come first, because a file may repeat rows often."""
        if row.error is not None:
            raise RowSkipped(Reason.UNREADABLE, row.error)
        with _otherwise(Reason.NO_PROMPT):
            content = self._schema.prompt_content(row.fields)
            rendered = self._schema.render_prompt(row.fields, content)
        text = as_text(rendered)
        with _otherwise(Reason.UNENCODABLE):
            prompt_id = hashlib.sha256(_encoded(text)).hexdigest()
        with _otherwise(Reason.NO_ANSWER):
            answer = self._schema.gold_answer(row.fields)
            pair = hashlib.sha256(_encoded(f"{normalised(text)}\0{answer}")).digest()
        if not self._held_out and pair in self._seen:
            raise RowSkipped(Reason.DUPLICATE)
        with _otherwise(Reason.UNREADABLE):
            fields = plain(row.fields)
        with _otherwise(Reason.UNENCODABLE):
            token_ids = self._dialogue.prompt(rendered)
        if len(token_ids) > self._task.max_prompt_tokens:
            limit = f"task.max_prompt_tokens={self._task.max_prompt_tokens}"
            raise RowSkipped(Reason.TOO_LONG, f"a prompt of {len(token_ids)} tokens, more than {limit}")
        self._seen.add(pair)
        self.questions.append(as_text(content))
        self.prompts.append(
            Prompt(
                index=len(self.prompts),
                prompt_id=prompt_id,
                text=text,
                token_ids=token_ids,
                answer=answer,
                row=fields,
            )
        )


def _encoded(text: str) -> bytes:
    """Encode as UTF-8. Raises ConfigError for lone surrogates, which JSON can contain but UTF-8 can't."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt or gold answer has a character that UTF-8 can't encode: {error}") from error


@contextmanager
def _otherwise(reason: Reason) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise RowSkipped(reason, str(error)) from error


class RowSource:
    """Training prompts of one file, shuffled every epoch; held-out prompts of another, in its order.

    The configured verifier decides how gold answers are parsed. A training prompt that the held-out file also has is
    left out. Bad rows are skipped and counted, and the log names the first of them. Raises ConfigError for a file
    without a valid row. Without task.path there is no training file, and `prompt` must not be called.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        task, verifier = config.task, verifier_name(config.environment, config.task)
        dialogue = Dialogue(task.chat, tokenizer)
        schema, held_out_schema = (Schema.of(task, verifier, held_out=held_out) for held_out in (False, True))
        held_out = PromptFile(task, held_out_schema, dialogue, held_out=True)
        self.report = DatasetReport(training=None, held_out=held_out.close())
        self._held_out = held_out.prompts[: task.held_out]
        self._prompts: list[Prompt] = []
        self.digests = {"task.held_out_path": prompts_digest(self._held_out)}
        if task.path is not None:
            training = PromptFile(task, schema, dialogue, held_out=False)
            training.leave_out_overlapping(held_out.questions)
            self.report.training = training.close()
            self._prompts = training.prompts
            self.digests["task.path"] = prompts_digest(self._prompts)
        self._seed = config.seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._prompts))
        return replace(self._prompts[self._order(epoch)[position]], index=index)

    def held_out(self) -> list[Prompt]:
        return list(self._held_out)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
