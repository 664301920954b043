"""The page of an evaluation on one benchmark, where a person reads prompts, completions and verdicts.

One file without anything from elsewhere: scores on top, then the problems, which open at a click and can be filtered by
what became of their greedy completion and by any text in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from areal_core.errors import StorageError, printable_lines
from areal_core.evaluation.records import Record
from areal_core.evaluation.scores import Scores
from areal_core.types import Outcome

_SAMPLES = 8  # of a problem that are shown


def _finalized(value: object) -> object:
    """Texts with control characters and marks of writing direction as escapes; tabs stay."""
    return "\t".join(map(printable_lines, value.split("\t"))) if type(value) is str else value


_JINJA = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_finalized)
_TEMPLATE = _JINJA.from_string(Path(__file__).with_suffix(".html").read_text())


def write_page(path: Path, title: str, records: Sequence[Record], scores: Scores) -> None:
    """Raises StorageError where the file can't be written."""
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
        raise StorageError(f"{path}: can't be written: {error.strerror}") from error
