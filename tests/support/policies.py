"""A policy with scripted completions, for environments without a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_core.models.tokenizer import EOS, char_tokenizer
from areal_core.types import Completion

TOKENIZER = char_tokenizer()
END = TOKENIZER.token_id(EOS)


def completion(text: str, *, version: int = 0, finish_reason: str = "stop") -> Completion:
    """One that ends with the end token unless it was cut off; log-probabilities 0, -1/8, -2/8, ..."""
    ids = [*TOKENIZER.encode(text), *([END] if finish_reason == "stop" else [])]
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=-np.arange(len(ids), dtype=np.float32) / 8,
        versions=np.full(len(ids), version, np.int32),
        finish_reason=finish_reason,
    )


class ScriptedPolicy:
    """Gives for every text the completions that `script` has for it, in order."""

    def __init__(self, script: dict[str, list[Completion]], *, limit: int = 100) -> None:
        """`limit`: tokens of a text and its completion."""
        self.script, self.limit = {key: list(value) for key, value in script.items()}, limit
        self.asked: list[str] = []

    async def sample(self, token_ids: Sequence[int], *, n: int = 1, max_tokens: int | None = None) -> list[Completion]:
        text = TOKENIZER.decode(token_ids)
        self.asked.append(text)
        return [self.script[text].pop(0) for _ in range(n)]

    def room(self, token_ids: Sequence[int]) -> int:
        return self.limit - len(token_ids)
