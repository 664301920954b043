"""Which rows are not trained on though nothing is wrong with them: those that repeat others, that overlap with held-out
prompts, or that the policy solves too rarely or too often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from areal_core.config.schema import TaskConfig
from areal_core.environments.dataset_report import LeftOut, Reason
from areal_core.environments.row_schema import Field, Fields
from areal_core.environments.rows import read_rows
from areal_core.errors import ConfigError

_RUN = 13  # words
_COMMON = 10  # texts that share a run of words, beyond which it is an idiom
_PUNCTUATION = re.compile(r"[^\w\s]")


def same(text: str) -> str:
    """One spelling of texts that differ in case and blanks alone."""
    return " ".join(text.casefold().split())


def overlapping(texts: Sequence[str], reserved: Iterable[str]) -> list[bool]:
    """Whether each of `texts` equals one of `reserved`, or shares a run of 13 words with one: lower case, without
    punctuation, as Brown et al., 2020 (GPT-3, appendix C) looked for test data in what they trained on. As there, a run
    that more than ten of `texts` have says nothing: it is an idiom, or the wording of whoever made the file."""
    reserved = list(reserved)
    equals, runs = set(map(same, reserved)), {run for text in reserved for run in _runs(text)}
    shared = [runs.intersection(_runs(text)) for text in texts]
    having = Counter(run for found in shared for run in found)
    return [
        same(text) in equals or any(having[run] <= _COMMON for run in found)
        for text, found in zip(texts, shared, strict=True)
    ]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = _PUNCTUATION.sub("", text.casefold()).split()
    return zip(*(words[start:] for start in range(_RUN)), strict=False)


class SuccessRates:
    """How often the policy solves a prompt, by a field of its row or by a file of them. Raises ConfigError for a file
    that can't be read."""

    def __init__(self, task: TaskConfig) -> None:
        self._bounds = (task.min_success, task.max_success)
        self._field = None if task.success_field is None else Field("task.success_field", task.success_field)
        self._path = task.success_path
        self._rates = {} if self._path is None else _read_rates(self._path)

    def check(self, fields: Fields, names: Sequence[str]) -> None:
        """Raises LeftOut for a row without rate, or with one that is out of bounds. `names` are those that the file may
        have for its prompt: its id and its texts."""
        if self._field is not None:
            rate = _rate(self._field.of(fields))
            missing = f"{self._field} must be a number from 0 to 1"
        elif self._path is not None:
            spelt = (*names, *map(same, names))
            rate = next((self._rates[name] for name in spelt if name in self._rates), None)
            missing = f"task.success_path: {self._path} has no rate of this prompt"
        else:
            return
        if rate is None:
            raise LeftOut(Reason.NO_RATE, missing)
        if not self._bounds[0] <= rate <= self._bounds[1]:
            raise LeftOut(Reason.TOO_HARD if rate < self._bounds[0] else Reason.TOO_EASY)


def _read_rates(path: str) -> Mapping[str, float]:
    rates: dict[str, float] = {}
    for row in read_rows("task.success_path", path):
        name = row.fields.get("prompt_id", row.fields.get("prompt"))
        rate = _rate(row.fields.get("rate"))
        if not isinstance(name, str) or rate is None:
            wrong = row.wrong or "must hold prompt_id or prompt, text, and rate, a number from 0 to 1"
            raise ConfigError(f"task.success_path: {path}, {row.place}: {wrong}")
        rates[name] = rate
    return {same(name): rate for name, rate in rates.items()} | rates  # the exact spelling counts first


def _rate(content: object) -> float | None:
    if isinstance(content, bool) or not isinstance(content, int | float) or not 0 <= content <= 1:
        return None
    return float(content)
