"""Text to tokens and back, through the `tokenizers` library alone: neither torch nor transformers is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from areal_core.errors import ModelError
from areal_core.models.chat import ChatTemplate

PAD = "<pad>"
EOS = "<eos>"
CHARACTERS = "0123456789+-*=;#"  # all that arithmetic prompts and completions are made of


class Tokenizer:
    """A tokenizer.json. Adds no tokens of its own: `encode` gives what the text spells, nothing before or after it."""

    def __init__(self, inner: tokenizers.Tokenizer, chat: ChatTemplate | None = None) -> None:
        self._inner = inner
        self.chat = chat  # the model's chat template, if it has one

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a model folder in the transformers format. Raises ModelError."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{file}: no such file; the model folder must hold its tokenizer in this format")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file}: not a tokenizer: {error}") from error
        return cls(inner, ChatTemplate.from_folder(folder))

    def encode(self, text: str) -> tuple[int, ...]:
        """Raises ModelError for a text that the vocabulary can't spell."""
        try:
            return tuple(self._inner.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the model's tokenizer can't spell {text[:40]!r}: {error}") from error

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text; its special tokens are left out, unless `special` is true."""
        return self._inner.decode(list(token_ids), skip_special_tokens=not special)

    def token_id(self, token: str) -> int:
        """The id of a token that the vocabulary is known to hold."""
        found = self._inner.token_to_id(token)
        assert found is not None, f"no token {token!r} in the vocabulary"
        return found

    @property
    def vocab_size(self) -> int:
        """Special and added tokens included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def save(self, file: Path) -> None:
        """Write tokenizer.json."""
        self._inner.save(str(file))


def write_settings(file: Path, *, eos: str | None, context: int, chat_template: str | None = None) -> None:
    """Write tokenizer_config.json, for transformers and vLLM."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": eos,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **({} if chat_template is None else {"chat_template": chat_template}),
    }
    file.write_text(json.dumps(settings, indent=2) + "\n")


def char_tokenizer() -> Tokenizer:
    """The embedded model's tokenizer: a token per character of the arithmetic task, after `<pad>` (0) and `<eos>` (1).
    It can spell nothing else."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([PAD, EOS])
    return Tokenizer(inner)
