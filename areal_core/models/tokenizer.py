"""Text to tokens and back, through the `tokenizers` library alone: neither torch nor transformers is imported."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from areal_core.errors import ModelError
from areal_core.models.chat import ChatTemplate
from areal_core.models.spec import read_json

PAD = "<pad>"
EOS = "<eos>"
CHARACTERS = "0123456789+-*=;#"  # all that arithmetic prompts and completions are made of


class Tokenizer:
    """A tokenizer.json. A text's tokens are always the same and all of it: truncation, padding and dropout, which the
    file may name for its own training, are off."""

    def __init__(self, inner: tokenizers.Tokenizer, chat: ChatTemplate | None = None, size: int | None = None) -> None:
        """`size` is the model's vocab_size; None where there is no model."""
        inner.no_truncation()
        inner.no_padding()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None
        self._inner = inner
        self._size = math.inf if size is None else size
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
        config = Path(folder) / "config.json"
        size = read_json(config).get("vocab_size") if config.exists() else None
        return cls(inner, ChatTemplate.from_folder(folder), size)

    def encode(self, text: str, *, opening: bool = False) -> tuple[int, ...]:
        """The tokens that spell a text. With `opening` the tokenizer's own come first, such as BOS, unless the text
        begins with them. Raises ModelError for a text that the vocabulary can't spell, or the model can't read."""
        try:
            encoding = self._inner.encode(text, add_special_tokens=opening)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the model's tokenizer can't spell {text[:40]!r}: {error}") from error
        ids, added = encoding.ids, encoding.special_tokens_mask
        first = ids[: added.index(0)] if 0 in added else []
        ids = [token for token, is_added in zip(ids, added, strict=True) if not is_added]
        if ids[: len(first)] != first:
            ids = first + ids
        if (highest := max(ids, default=0)) >= self._size:
            raise ModelError(
                f"the model's tokenizer gives token {highest} ({self._inner.id_to_token(highest)!r}) for {text[:40]!r},"
                f" vocab_size of config.json is {self._size}: leave the text out or take this model's own tokenizer"
            )
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text; its special tokens are left out, unless `special` is true."""
        return self._inner.decode(list(token_ids), skip_special_tokens=not special)

    def token_id(self, token: str) -> int:
        """The id of a token that the vocabulary is known to hold."""
        found = self._inner.token_to_id(token)
        assert found is not None, f"no token {token!r} in the vocabulary"
        return found

    def is_special(self, token_id: int) -> bool:
        found = self._inner.get_added_tokens_decoder().get(token_id)
        return found is not None and found.special

    @property
    def vocab_size(self) -> int:
        """Special and added tokens included."""
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
    """The embedded model's tokenizer: a token per character of the arithmetic task, after `<pad>` (0) and `<eos>` (1).
    It can spell nothing else."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([PAD, EOS])
    return Tokenizer(inner)
