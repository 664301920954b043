"""Encode and decode text with the `tokenizers` library, and render chat templates with transformers.

This module never imports torch. It imports transformers only to render a template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from areal_core.errors import ModelError
from areal_core.models.spec import read_json

Message = Mapping[str, str]  # {"role": "system", "user" or "assistant", "content": text}

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja chat template with the special tokens that it may use."""

    source: str  # Jinja
    tokens: Mapping[str, str]  # bos_token and others -> text

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """Read the chat template of a model folder; None if the folder has none.

        It comes from chat_template.jinja, or else from tokenizer_config.json. Among several named templates, `default`
        counts. Raises ModelError for unreadable files.
        """
        folder = Path(folder)
        settings_file, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        older = folder / "special_tokens_map.json"
        try:
            settings = json.loads(settings_file.read_text()) if settings_file.exists() else {}
            if older.exists() and "added_tokens_decoder" not in settings:  # as transformers does
                settings |= json.loads(older.read_text())
            source = file.read_text() if file.exists() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: can't read its chat template: {error}") from error
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
        """Render a conversation as text. `generation_prompt` opens the assistant's next message.

        `thinking` is passed to the template as `enable_thinking`, unless it is None. Raises ModelError if the template
        fails.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # importing it takes a second

        variables: dict[str, Any] = {**self.tokens, **({} if thinking is None else {"enable_thinking": thinking})}
        try:
            [text], _ = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except Exception as error:  # a template may raise anything
            raise ModelError(f"the chat template fails: {type(error).__name__}: {error}") from error
        return text


PAD = "<pad>"
EOS = "<eos>"
CHARACTERS = "0123456789+-*=;#"  # the characters of arithmetic prompts and completions


class Tokenizer:
    """A tokenizer.json with truncation, padding and dropout switched off.

    So encoding a text is deterministic and complete, even if the file enables these for its own training.
    """

    def __init__(self, inner: tokenizers.Tokenizer, chat: ChatTemplate | None = None, size: int | None = None) -> None:
        """`size` is the model's vocab_size; None if there is no model."""
        inner.no_truncation()
        inner.no_padding()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None
        self._inner = inner
        self._size = math.inf if size is None else size
        self.chat = chat  # the model's chat template, if it has one

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder in the transformers format. Raises ModelError."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{file}: no such file; the model folder must hold its tokenizer in this format")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file}: not a tokenizer: {error}") from error
        config = Path(folder) / "config.json"
        size = read_json(config).get("vocab_size") if config.exists() else None
        return cls(inner, ChatTemplate.from_folder(folder), size)

    def encode(self, text: str, *, opening: bool = False) -> tuple[int, ...]:
        """Encode a text. `opening` puts the tokenizer's own opening tokens first, such as BOS, unless they are there.

        Raises ModelError if the vocabulary can't spell the text, or if a token id is not below the model's vocab_size.
        """
        try:
            encoding = self._inner.encode(text, add_special_tokens=opening)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the model's tokenizer can't encode {text[:40]!r}: {error}") from error
        ids, added = encoding.ids, encoding.special_tokens_mask
        first = ids[: added.index(0)] if 0 in added else []
        ids = [token for token, is_added in zip(ids, added, strict=True) if not is_added]
        if ids[: len(first)] != first:
            ids = first + ids
        if (highest := max(ids, default=0)) >= self._size:
            wanted = f"below vocab_size of config.json ({self._size})"
            got = f"{highest} ({self._inner.id_to_token(highest)!r}) for {text[:40]!r}"
            advice = "remove this text from the prompts, or use the model's own tokenizer.json"
            raise ModelError(f"tokenizer.json: token ids must be {wanted}, got {got}; {advice}")
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens to text. Special tokens are left out unless `special` is true."""
        return self._inner.decode(list(token_ids), skip_special_tokens=not special)

    def token_id(self, token: str) -> int:
        """Return the id of a token, which must be in the vocabulary."""
        found = self._inner.token_to_id(token)
        assert found is not None, f"no token {token!r} in the vocabulary"
        return found

    def is_special(self, token_id: int) -> bool:
        found = self._inner.get_added_tokens_decoder().get(token_id)
        return found is not None and found.special

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special and added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def save(self, file: Path) -> None:
        """Write tokenizer.json."""
        self._inner.save(str(file))


def write_settings(
    file: Path, *, eos: str | None, context: int, bos: str | None = None, chat_template: str | None = None
) -> None:
    """Write tokenizer_config.json, for transformers and vLLM."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **({} if chat_template is None else {"chat_template": chat_template}),
    }
    file.write_text(json.dumps(settings, indent=2) + "\n")


def char_tokenizer() -> Tokenizer:
    """Make the embedded model's tokenizer: `<pad>` (0), `<eos>` (1), then one token per character.

    `CHARACTERS` lists the characters; it can't encode others.
    """
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([PAD, EOS])
    return Tokenizer(inner)
