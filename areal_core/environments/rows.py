"""Read rows of files (JSON lines, a JSON list, or Parquet) and interpret their fields.

The only user of pyarrow, which is imported when a file needs it. A `Schema` extracts a row's prompt, the prompt as
the policy gets it, and its gold answer.
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from areal_core.config.groups import TaskConfig
from areal_core.environments.dialogue import PromptContent
from areal_core.environments.mathematics import balanced, gold_answer, normalised
from areal_core.environments.unit_tests import unit_tests
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import Message

_BATCH = 1024  # rows of a Parquet file in memory at once


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place in the file, and its fields or the error that prevented reading them."""

    place: str  # "line 7" or "row 7", counted from 1
    fields: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


def read_rows(name: str, path: str) -> Iterator[Row]:
    """Read the rows of a file.
    Raises ConfigError, which begins with the setting `name`, if the file can't be read."""
    try:
        if path.endswith(".parquet"):
            yield from _numbered(_parquet(path))
        elif path.endswith(".json"):
            yield from _numbered(_listed(path))
        else:
            yield from _lines(path)
    except ConfigError as error:
        raise ConfigError(f"{name}: {path} {error}") from error
    except Exception as error:  # pyarrow may raise anything for a broken file
        raise ConfigError(f"{name}: can't read {path}: {_first_line(error)}") from error


def _lines(path: str) -> Iterator[Row]:
    """Read one JSON object for each line.
    Empty lines are skipped; a row with invalid JSON has `error` set."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _row(f"line {number}", line)


def _row(place: str, line: bytes) -> Row:
    try:
        return _object(place, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Row(place, error=f"not UTF-8: {error}")
    except (ValueError, RecursionError) as error:  # json's own errors, numbers of too many digits, unclosed brackets
        return Row(place, error=f"not JSON: {_first_line(error)}")


def _object(place: str, value: object) -> Row:
    return Row(place, value) if isinstance(value, dict) else Row(place, error="must be a JSON object")


def _listed(path: str) -> list[Any]:
    try:
        rows = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"must be JSON, or be named .jsonl if it holds one object per line: {error}") from error
    if not isinstance(rows, list):
        raise ConfigError("must hold a list of JSON objects")
    return rows


def _numbered(rows: Iterable[object]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield _object(f"row {number}", row)


def _parquet(path: str) -> Iterator[Mapping[str, object]]:
    from pyarrow import parquet  # takes a third of a second to import

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH):
            yield from batch.to_pylist()


_DEEPEST = 32  # deepest nesting of lists and objects in a row


def plain(value: object, depth: int = 0) -> Any:
    """Convert a row's value to plain JSON, so that reward workers on every machine get the same.
    Values outside JSON and MessagePack (times, bytes, decimals, larger numbers) become text. Raises ConfigError for
    nesting that is too deep."""
    if depth > _DEEPEST:
        raise ConfigError(f"lists and objects nested more than {_DEEPEST} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {sys.intern(plain(str(name))): plain(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    text = str(value)
    return text if text.isascii() else text.encode(errors="replace").decode()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


Fields = Mapping[str, object]
GoldReader = Callable[[object, Fields], str]
"""Reads the gold answer for one verifier, from the content of the answer field and its row. Raises ConfigError that
says what the field must hold."""

_ROLES = ("system", "user", "assistant")
_MISSING = object()
_TEMPLATES = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


@dataclass(frozen=True, slots=True)
class Field:
    """A field named by a setting; dots lead into nested objects: `reward_model.ground_truth`."""

    setting: str
    name: str

    def __str__(self) -> str:
        return f"{self.setting}={self.name}"

    def of(self, fields: Fields) -> object:
        """The field's value in a row; `_MISSING` if the row lacks it."""
        found: object = fields
        for name in self.name.split("."):
            found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
        return found


def compile_template(setting: str, source: str) -> Callable[[Fields], str]:
    """Return a function that renders a row with a Jinja template over its fields.
    Raises ConfigError, which names the setting, for an invalid template. The function raises it if the template fails
    on a row."""
    try:
        template = _TEMPLATES.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{setting}: must be a Jinja template: {error}, in {source!r}") from error

    def render(fields: Fields) -> str:
        try:
            text = template.render(dict(fields))
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"{setting} fails: {error}") from error
        if not text.strip():
            raise ConfigError(f"{setting} must render a text, got none")
        return text

    return render


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of one file's rows. Raises ConfigError, with setting and field, if a row lacks one."""

    prompt: Field
    template: Callable[[Fields], str] | None  # None: the row's prompt is used unchanged
    answer: Field
    gold: GoldReader

    @classmethod
    def of(cls, task: TaskConfig, verifier: str, *, held_out: bool) -> Schema:
        """Build the schema of the training or the held-out file, for the given verifier.
        Settings that the held-out file does not have fall back to those of the training file."""

        def setting(name: str) -> tuple[str, Any]:
            own = getattr(task, f"held_out_{name}") if held_out else None
            return (f"task.held_out_{name}", own) if own is not None else (f"task.{name}", getattr(task, name))

        template, source = setting("prompt_template")
        render = None if source is None else compile_template(template, source)
        prompt, answer = (Field(*setting(name)) for name in ("prompt_field", "answer_field"))
        return cls(prompt, render, answer, GOLD.get(verifier, _as_it_stands))

    def prompt_content(self, fields: Fields) -> PromptContent:
        """The row's prompt: text, or messages of a chat."""
        content = self.prompt.of(fields)
        prompt = content if isinstance(content, str) and content.strip() else _messages(content)
        if prompt is None:
            raise ConfigError(
                f"{self.prompt} must be text, or messages of a chat that end with the user's, got {_shown(content)}"
            )
        return prompt

    def render_prompt(self, fields: Fields, content: PromptContent) -> PromptContent:
        """The prompt as the policy gets it, with the template applied."""
        return content if self.template is None else self.template(fields)

    def gold_answer(self, fields: Fields) -> str:
        """The gold answer in the verifier's format."""
        try:
            return self.gold(self.answer.of(fields), fields)
        except ConfigError as error:
            raise ConfigError(f"{self.answer} {error}") from error


def _messages(content: object) -> tuple[Message, ...] | None:
    """Chat messages reduced to role and content; None for anything else."""
    if not isinstance(content, list) or not content:
        return None
    messages: list[Message] = []
    for message in content:
        role, text = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in _ROLES or not isinstance(text, str):
            return None
        messages.append({"role": role, "content": text})
    return tuple(messages) if messages[-1]["role"] == "user" and messages[-1]["content"].strip() else None


def _mathematics(content: object, _: Fields) -> str:
    """The answer itself, or the final answer of a solution."""
    answer = gold_answer(_text(content))
    if answer is None or not balanced(normalised(answer)):
        wanted = r"a final answer, or a solution that ends with one (\boxed{7} or #### 7)"
        raise ConfigError(f"must be {wanted}, got {_shown(content)}")
    return answer


def _as_it_stands(content: object, _: Fields) -> str:
    """Text and numbers unchanged, lists and objects as JSON."""
    return json.dumps(content, default=str) if isinstance(content, list | dict) else _text(content)


def _text(content: object) -> str:
    if isinstance(content, str) and content.strip():
        return content
    if isinstance(content, int | float | Decimal) and not isinstance(content, bool) and math.isfinite(content):
        return str(content)
    raise ConfigError(f"must be text or a number, got {_shown(content)}")


def _shown(content: object) -> str:
    return "nothing" if content is _MISSING else f"{content!r:.60}"


GOLD: dict[str, GoldReader] = {"mathematics": _mathematics, "code": unit_tests}  # by the verifier's name
