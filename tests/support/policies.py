"""Policies with scripted completions, for environments without a server."""

from __future__ import annotations

import asyncio

import numpy as np

from areal_core.config.groups import TaskConfig
from areal_core.models.tokenizer import EOS, char_tokenizer
from areal_core.rewards.record import RecordingPolicy
from areal_core.types import Completion, Prompt

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


class Scripted:
    """Policies that give for every text the completions that `script` has for it, in order."""

    def __init__(self, script: dict[str, list[Completion]]) -> None:
        self.script = {key: list(value) for key, value in script.items()}
        self.asked: list[str] = []

    def policy(self, task: Prompt, *, max_new_tokens: int = 100, max_prompt_tokens: int = 40) -> RecordingPolicy:
        """Of one rollout, which may have these lengths and eight turns."""
        limits = TaskConfig(max_new_tokens=max_new_tokens, max_prompt_tokens=max_prompt_tokens)
        return RecordingPolicy(task=task, limits=limits, max_turns=8, opens=False, complete=self._complete)

    async def _complete(
        self, call: int, token_ids: tuple[int, ...], max_tokens: int, stop: tuple[int, ...]
    ) -> Completion:
        text = TOKENIZER.decode(token_ids)
        self.asked.append(text)
        await asyncio.sleep(0)
        return self.script[text].pop(0)
