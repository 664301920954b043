"""Prompts from files of one JSON object a line, such as GSM8K's."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
from pathlib import Path

from areal_core.config.schema import TaskConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.mathematics import balanced, gold_answer, normalised
from areal_core.errors import ConfigError, ModelError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt

logger = logging.getLogger(__name__)

_NAMED = 3  # bad rows of a file that are named


class JsonlSource:
    """Training prompts of one file, in an order shuffled anew every epoch; held-out prompts of another.

    A training prompt that the held-out file also has is left out. Bad rows are skipped and named in a warning; with
    task.bad_rows=refuse the first raises ConfigError naming file and line, as a file of nothing else always does.
    """

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, *, seed: int) -> None:
        assert task.path is not None  # config.load sees to both
        assert task.held_out_path is not None
        dialogue = Dialogue(task.chat, tokenizer)
        everything_held_out = _read("task.held_out_path", task.held_out_path, task, dialogue)
        reserved = {prompt.prompt_id for prompt in everything_held_out}
        self._held_out = everything_held_out[: task.held_out]
        self._prompts = [p for p in _read("task.path", task.path, task, dialogue) if p.prompt_id not in reserved]
        if not self._prompts:
            raise ConfigError(f"task.path: every prompt of {task.path} is held out by {task.held_out_path}")
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._prompts))
        found = self._prompts[self._order(epoch)[position]]
        return Prompt(
            index=index, prompt_id=found.prompt_id, text=found.text, token_ids=found.token_ids, answer=found.answer
        )

    def held_out(self) -> list[Prompt]:
        return list(self._held_out)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _read(name: str, path: str, task: TaskConfig, dialogue: Dialogue) -> list[Prompt]:
    """The prompts of a file. `name` is the setting that holds its path."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: can't read {path}: {error}") from error
    prompts: list[Prompt] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(line, len(prompts), task, dialogue))
        except (ConfigError, ModelError) as error:
            if task.bad_rows == "refuse":
                raise ConfigError(f"{name}: {path}, line {number}: {error}") from error
            bad.append(f"line {number}: {error}")
    if not prompts:
        raise ConfigError(f"{name}: {path} holds no prompt" + (f"; {bad[0]}" if bad else ""))
    if bad:
        named = "; ".join(bad[:_NAMED]) + ("; ..." if len(bad) > _NAMED else "")
        logger.warning("%s: %s: %d of %d rows are skipped: %s", name, path, len(bad), len(bad) + len(prompts), named)
    return prompts


def _parse(line: str, index: int, task: TaskConfig, dialogue: Dialogue) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError("must be a JSON object")
    text = row.get(task.prompt_field)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"task.prompt_field={task.prompt_field} must be text")
    field = row.get(task.answer_field)
    if not isinstance(field, str | int | float) or isinstance(field, bool):
        raise ConfigError(f"task.answer_field={task.answer_field} must be text or a number")
    answer = gold_answer(str(field))
    if answer is None or not balanced(normalised(answer)):
        raise ConfigError(f"task.answer_field={task.answer_field} must hold an answer, or end on one")
    token_ids = dialogue.prompt(text)
    if len(token_ids) > task.max_prompt_tokens:
        raise ConfigError(
            f"a prompt of {len(token_ids)} tokens, more than task.max_prompt_tokens={task.max_prompt_tokens}"
        )
    return Prompt(
        index=index,
        prompt_id=hashlib.sha256(text.encode()).hexdigest(),
        text=text,
        token_ids=token_ids,
        answer=answer,
    )
