"""Tasks of reasoning-gym: an endless stream of generated prompts, and reasoning-gym's own verifiers.

Every prompt is a pure function of (seed, index). A fixed share of all texts, chosen by hash, is held out of training.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

from areal_core.config.fields import require
from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import SEED, is_held_out, reserved
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.environment import Verdict
from areal_core.environments.fork_server import ForkServer
from areal_core.environments.rows import plain
from areal_core.errors import ConfigError, RewardError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Outcome, Prompt

_DRAWS = 64  # draws for one training prompt; the first that is not held out counts, and one in ten is held out
_OPENING, _CLOSING = "<answer>", "</answer>"
_CPU_LIMIT_S = 2.0  # CPU limit of one answer


class ProceduralSource:
    """An endless stream of prompts of one reasoning-gym data set.

    Raises ConfigError if the data set does not exist or rejects its options.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        assert config.task.dataset is not None  # config.load ensures this
        self._task, self._dialogue = config.task, Dialogue(config.task.chat, tokenizer)
        self._training_seed = int.from_bytes(hashlib.sha256(f"training/{config.seed}".encode()).digest()[:4])
        self._held_out = self._draw_held_out()

    def prompt(self, index: int) -> Prompt:
        """Generate a training prompt.
        Raises ConfigError if none of its draws fits into task.max_prompt_tokens."""
        for draw in range(_DRAWS * index, _DRAWS * (index + 1)):
            prompt = self._prompt(index, self._training_seed, draw)
            if not is_held_out(prompt.text) and self._fits(prompt):
                return prompt
        raise ConfigError(f"task.max_prompt_tokens: must be larger for {self._task.dataset}, whose prompts are longer")

    def held_out(self) -> list[Prompt]:
        return list(self._held_out)

    def _draw_held_out(self) -> list[Prompt]:
        """The first distinct reserved prompts under a fixed seed. Raises ConfigError if there are too few."""
        task, of = self._task, (self._task.dataset or "", self._task.dataset_options, SEED)
        draws = ((entry(*of, draw)["question"], draw) for draw in itertools.count())
        found = reserved(draws, task.held_out, lambda draw: self._fits(self._prompt(0, SEED, draw)))
        limit = f"task.max_prompt_tokens={task.max_prompt_tokens}"
        wanted = f"at most about {len(found)}, the distinct prompts that {task.dataset} has with {limit}"
        require(task.held_out <= len(found), "task.held_out", wanted, task.held_out)
        return [self._prompt(index, SEED, draw) for index, draw in enumerate(found)]

    def _fits(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) <= self._task.max_prompt_tokens

    def _prompt(self, index: int, seed: int, draw: int) -> Prompt:
        name, options = self._task.dataset or "", self._task.dataset_options
        made = entry(name, options, seed, draw)
        answer = {"answer": made["answer"], "dataset": name, "options": options, "seed": seed, "draw": draw}
        return Prompt(
            index=index,
            prompt_id=hashlib.sha256(made["question"].encode()).hexdigest(),
            text=made["question"],
            token_ids=self._dialogue.prompt(made["question"]),
            answer=json.dumps(answer),
            row=plain(made),
        )


def procedural(task: Prompt, completion: str, isolation: str = "confined") -> Verdict:
    """Score the completion's answer (`reading`) with the data set's own scorer.
    Only a score of 1 is correct."""
    told = json.loads(task.answer)
    answer = reading(completion, lines=len(str(told["answer"]).strip().splitlines()))
    if answer is None:
        return Verdict.of(Outcome.NO_ANSWER)
    reply = _scores(isolation).ask(told, answer)
    if reply.status != "done":  # raised: the data set can't score the answer
        return Verdict.of(Outcome.UNPARSABLE if reply.status == "raised" else Outcome.TIMED_OUT, answer)
    score = min(max(0.0, reply.value), 1.0) if isinstance(reply.value, float) else 0.0
    return Verdict(Outcome.CORRECT if score == 1.0 else Outcome.INCORRECT, score, answer)


def procedural_share(task: Prompt, completion: str, isolation: str = "confined") -> Verdict:
    """Score as `procedural`, but raise the score of an answer that contains the gold answer.
    It scores at least the gold answer's share of its characters, a first reward for a policy that answers in
    sentences."""
    verdict, gold = procedural(task, completion, isolation), json.loads(task.answer)["answer"]
    if not gold or gold not in (verdict.answer or ""):
        return verdict
    return replace(verdict, score=max(verdict.score or 0.0, len(gold) / len(verdict.answer or "")))


@functools.cache
def _scores(isolation: str) -> ForkServer:
    return ForkServer("areal_core.environments.procedural_scores:Scores", cpu_s=_CPU_LIMIT_S, isolation=isolation)


def reading(completion: str, lines: int = 1) -> str | None:
    """Extract a completion's answer: the text in its last <answer> tags, or else its last lines.
    The number of `lines` is that of the gold answer. None: the completion is blank."""
    tagged, end = None, 0
    while (start := completion.find(_OPENING, end)) >= 0 and (end := completion.find(_CLOSING, start)) >= 0:
        tagged = completion[start + len(_OPENING) : end]
    if tagged is not None:
        return tagged.strip()
    return "\n".join(completion.strip().splitlines()[-max(1, lines) :]).strip() or None


_entries = ForkServer("areal_core.environments.procedural_scores:Entries", cpu_s=_CPU_LIMIT_S, isolation="none")


@functools.lru_cache(maxsize=1024)
def entry(dataset: str, options: str, seed: int, draw: int) -> dict[str, Any]:
    """Question, answer and metadata of an entry, equal in every process; some depend on the hash seed.
    Raises ConfigError if the data set or the options make no entry."""
    try:
        return pickle.loads(base64.b85decode(_entries.prepared([dataset, options, seed, draw])))
    except RewardError as error:
        _, _, why = str(error).partition("ConfigError: ")
        told, advice = f"{dataset} could not generate entry {draw} ({error})", "easier task.dataset_options"
        raise ConfigError(why or f"task.dataset: {told}; choose another data set, or {advice}") from None
