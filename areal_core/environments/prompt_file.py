"""The prompts of one file, and the dataset report of its other rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from areal_core.config.schema import TaskConfig
from areal_core.environments.dataset_report import FileReport, LeftOut, Reason
from areal_core.environments.dialogue import Dialogue, as_text
from areal_core.environments.row_filters import SuccessRates, overlapping, same
from areal_core.environments.row_schema import Schema
from areal_core.environments.rows import Row, read_rows
from areal_core.errors import ConfigError, ModelError
from areal_core.types import Prompt

logger = logging.getLogger(__name__)

_NAMED = 3  # bad rows, in the log and the dataset report


class PromptFile:
    """The file of the setting `name`, read whole. With `rates` it is one to train on, whose rows are filtered; all that
    a held-out file has and the policy can be fed is a prompt. Raises ConfigError, naming the setting, for a file that
    can't be read, and with task.bad_rows=refuse for the first bad row."""

    def __init__(
        self,
        name: str,
        path: str,
        schema: Schema,
        task: TaskConfig,
        dialogue: Dialogue,
        *,
        rates: SuccessRates | None = None,
    ) -> None:
        self._name, self._report = name, FileReport(path)
        self._task, self._schema, self._dialogue, self._rates = task, schema, dialogue, rates
        self._seen: set[bytes] = set()  # hashes of texts and gold answers
        self.prompts: list[Prompt] = []
        self.questions: list[str] = []  # what their rows ask, without the words that a template puts around it
        for row in read_rows(name, path):
            self._report.rows += 1
            try:
                self._add(row)
            except LeftOut as found:
                self._leave_out(row, found)

    def leave_out_overlapping(self, reserved: Iterable[str]) -> None:
        """Leave out what equals one of these texts, or shares a run of words with one."""
        overlaps = overlapping(self.questions, reserved)
        if any(overlaps):
            self._report.leave_out(Reason.OVERLAPPING, sum(overlaps))
        self.prompts = [prompt for prompt, overlaps in zip(self.prompts, overlaps, strict=True) if not overlaps]

    def close(self) -> FileReport:
        """Say in one line of the log what the file has come to. Raises ConfigError where that is not one prompt."""
        report = self._report
        report.prompts = len(self.prompts)
        if not self.prompts:
            raise ConfigError(f"{self._name}: there is no prompt in {report}")
        logger.log(logging.WARNING if report.bad else logging.INFO, "%s: %s", self._name, report)
        return report

    def _leave_out(self, row: Row, found: LeftOut) -> None:
        self._report.leave_out(found.reason)
        if not found.reason.is_bad:
            return
        if self._task.bad_rows == "refuse":
            raise ConfigError(f"{self._name}: {self._report.path}, {row.place}: {found}") from found
        if len(self._report.bad) < _NAMED:
            self._report.bad.append(f"{row.place}: {found}")

    def _add(self, row: Row) -> None:
        """Add the prompt of a row, or raise LeftOut. What costs least comes first: a file may repeat itself often."""
        if row.wrong is not None:
            raise LeftOut(Reason.UNREADABLE, row.wrong)
        with _otherwise(Reason.NO_PROMPT):
            asked = self._schema.asked(row.fields)
            worded = self._schema.worded(row.fields, asked)
        text, question = as_text(worded), as_text(asked)
        with _otherwise(Reason.UNSPELLABLE):
            prompt_id = hashlib.sha256(_encoded(text)).hexdigest()
        with _otherwise(Reason.NO_ANSWER):
            answer = self._schema.gold_answer(row.fields)
            pair = hashlib.sha256(_encoded(f"{same(text)}\0{answer}")).digest()
        if self._rates is not None:
            if pair in self._seen:
                raise LeftOut(Reason.DUPLICATE)
            self._rates.check(row.fields, (prompt_id, text, question))
        with _otherwise(Reason.UNSPELLABLE):
            token_ids = self._dialogue.prompt(worded)
        if len(token_ids) > self._task.max_prompt_tokens:
            limit = f"task.max_prompt_tokens={self._task.max_prompt_tokens}"
            raise LeftOut(Reason.TOO_LONG, f"a prompt of {len(token_ids)} tokens, more than {limit}")
        if self._rates is not None and len(token_ids) < self._task.min_prompt_tokens:
            raise LeftOut(Reason.TOO_SHORT)
        self._seen.add(pair)
        self.questions.append(question)
        self.prompts.append(
            Prompt(index=len(self.prompts), prompt_id=prompt_id, text=text, token_ids=token_ids, answer=answer)
        )


def _encoded(text: str) -> bytes:
    """Raises ConfigError for halves of characters, which JSON can name and nothing can send."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a text without spelling in UTF-8: {error}") from error


@contextmanager
def _otherwise(reason: Reason) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise LeftOut(reason, str(error)) from error
