"""A model's chat template: messages to the text that it was tuned on, by transformers' own rendering of its Jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.errors import ModelError

Message = Mapping[str, str]  # {"role": "system", "user" or "assistant", "content": text}

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, and the special tokens that it may name."""

    source: str  # Jinja
    tokens: Mapping[str, str]  # bos_token and others -> text

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a model folder, from chat_template.jinja or else tokenizer_config.json; None where it has
        none. Of several named ones it is `default`. Raises ModelError for files that can't be read."""
        folder = Path(folder)
        settings_file, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        older = folder / "special_tokens_map.json"
        try:
            settings = json.loads(settings_file.read_text()) if settings_file.exists() else {}
            if older.exists() and "added_tokens_decoder" not in settings:  # as transformers does
                settings |= json.loads(older.read_text())
            source = file.read_text() if file.exists() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: its chat template is not readable: {error}") from error
        if isinstance(source, list):
            source = next((named["template"] for named in source if named.get("name") == "default"), None)
        if not source:
            return None
        named = {name: settings.get(name) for name in _TOKENS}
        return cls(
            source,
            {name: text["content"] if isinstance(text, dict) else text for name, text in named.items() if text},
        )

    def render(self, messages: Sequence[Message], *, generation_prompt: bool, thinking: bool | None = None) -> str:
        """The text of a conversation, up to where the assistant speaks next if there is a `generation_prompt`. A
        template that knows `enable_thinking` is given `thinking`, unless that is None. Raises ModelError for one that
        fails."""
        from transformers.utils.chat_template_utils import render_jinja_template  # a second of imports

        variables: dict[str, Any] = {**self.tokens, **({} if thinking is None else {"enable_thinking": thinking})}
        try:
            [text], _ = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except Exception as error:  # whatever a template may do
            raise ModelError(f"the chat template fails: {type(error).__name__}: {error}") from error
        return text
