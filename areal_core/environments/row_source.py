"""Prompts from the rows of two files: one to train on, and one that is held out.

    file -> rows -> what they ask, their gold answers, their tokens -> prompts, and a report of all other rows

`rows` reads, `row_schema` says what fields mean, `row_filters` what is not trained on, and `prompt_file` does all of
this for one file.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

from areal_core.config.schema import RunConfig
from areal_core.environments.dataset_report import DatasetReport
from areal_core.environments.datasets import prompts_digest
from areal_core.environments.dialogue import Dialogue, as_text
from areal_core.environments.prompt_file import PromptFile
from areal_core.environments.registry import verifier_name
from areal_core.environments.row_filters import SuccessRates
from areal_core.environments.row_schema import Field, Schema, question
from areal_core.environments.rows import read_rows
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt

_BENCHMARK_FIELDS = ("question", "problem", "prompt")  # what a benchmark asks, where the task's own fields hold nothing


class RowSource:
    """Training prompts of one file, in an order shuffled anew every epoch; held-out prompts of another, as it has them.

    Gold answers are read for the verifier that judges. A training prompt that the held-out file or a benchmark also has
    is left out. Bad rows are skipped and counted, the first of them named in the log; with task.bad_rows=refuse the
    first raises ConfigError naming file and row, as a file of nothing else always does. Without task.path there is
    nothing to train on, and `prompt` is not to be called.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        task, verifier = config.task, verifier_name(config.environment, config.task)
        assert task.held_out_path is not None  # config.load sees to it
        dialogue = Dialogue(task.chat, tokenizer)
        schema, held_out_schema = (Schema.of(task, verifier, held_out=held_out) for held_out in (False, True))
        held_out = PromptFile("task.held_out_path", task.held_out_path, held_out_schema, task, dialogue)
        self.report = DatasetReport(training=None, held_out=held_out.close())
        self._held_out = held_out.prompts[: task.held_out]
        self._prompts: list[Prompt] = []
        self.digests = {"task.held_out_path": prompts_digest(self._held_out)}
        if task.path is not None:
            training = PromptFile("task.path", task.path, schema, task, dialogue, rates=SuccessRates(task))
            training.leave_out_overlapping(
                [*held_out.questions, *_benchmarks(task.benchmark_paths, schema, held_out_schema)]
            )
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


def _benchmarks(paths: str, *schemas: Schema) -> Iterator[str]:
    """What the rows of these files ask. Raises ConfigError for one that does not say: it could not be kept out."""
    setting = "task.benchmark_paths"
    fields = [schema.prompt for schema in schemas] + [Field(setting, name) for name in _BENCHMARK_FIELDS]
    for path in filter(None, map(str.strip, paths.split(","))):
        for row in read_rows(setting, path):
            asked = next(filter(None, (question(field.of(row.fields)) for field in fields)), None)
            if asked is None:
                names = ", ".join(dict.fromkeys(field.name for field in fields))
                wrong = row.wrong or f"must hold what it asks in one of the fields {names}"
                raise ConfigError(f"{setting}: {path}, {row.place}: {wrong}")
            yield as_text(asked)
