"""A tokenizer that spells everything: a token a word, every word the unknown one."""

import tokenizers

from areal_core.models.tokenizer import Tokenizer


def word_tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)
