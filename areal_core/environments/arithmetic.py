"""Chained arithmetic, the embedded task: digits joined by + - *, evaluated left to right modulo 10.

The prompt `1-1-7=` has the worked solution `1-1=0;0-7=3#3` and the direct answer `#3`. The number of operations is
geometric, so worked solutions have long-tailed lengths. One guess in ten is correct. Every prompt is a pure function
of (seed, index). A fixed share of all texts, chosen by hash, is held out of training.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass

from areal_core.config.fields import require
from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import SEED, is_held_out, reserved
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt


@dataclass(frozen=True, slots=True)
class Chain:
    """`digits[0] operators[0] digits[1] ...`, with one digit more than operators."""

    digits: tuple[int, ...]
    operators: str

    @property
    def prompt(self) -> str:
        return "".join(f"{d}{o}" for d, o in zip(self.digits, self.operators + "=", strict=True))

    @property
    def answer(self) -> str:
        """The gold answer: one digit."""
        return self._steps()[-1][-1]

    @property
    def worked(self) -> str:
        """Every step, then the answer: 6 characters for each operation, and 1 more."""
        return ";".join(self._steps()) + f"#{self.answer}"

    @property
    def direct(self) -> str:
        return f"#{self.answer}"

    def _steps(self) -> list[str]:
        steps, value = [], self.digits[0]
        for operator, digit in zip(self.operators, self.digits[1:], strict=True):
            result = {"+": value + digit, "-": value - digit, "*": value * digit}[operator] % 10
            steps.append(f"{value}{operator}{digit}={result}")
            value = result
        return steps


def draw(rng: random.Random, max_operations: int, decay: float) -> Chain:
    """Draw a chain of n operations, with P(n) proportional to decay^n and n in 1..max_operations."""
    weights = [decay**n for n in range(max_operations)]
    operations = rng.choices(range(1, max_operations + 1), weights)[0]
    digits = tuple(rng.randrange(10) for _ in range(operations + 1))
    return Chain(digits, "".join(rng.choices("+-*", k=operations)))


def training_chain(seed: int, index: int, max_operations: int, decay: float) -> Chain:
    """The index-th training chain of a seed: the first draw of its own random stream that is not held out."""
    rng = random.Random(f"{seed}/{index}")
    while is_held_out((chain := draw(rng, max_operations, decay)).prompt):
        pass
    return chain


def held_out_chains(count: int, max_operations: int, decay: float) -> list[Chain]:
    """The first `count` distinct reserved chains under a fixed seed.
    Raises ConfigError if the task has too few."""
    rng = random.Random(SEED)
    drawn = (draw(rng, max_operations, decay) for _ in itertools.count())
    chains = reserved(((chain.prompt, chain) for chain in drawn), count)
    wanted = f"at most about {len(chains)}, the distinct prompts reserved with task.max_operations={max_operations}"
    require(count <= len(chains), "task.held_out", wanted, count)
    return chains


class ArithmeticSource:
    """An endless stream of prompts of the embedded task."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        task = config.task
        longest = 2 * task.max_operations + 2
        wanted = f"at least {longest} with task.max_operations={task.max_operations}"
        require(task.max_prompt_tokens >= longest, "task.max_prompt_tokens", wanted, task.max_prompt_tokens)
        self._tokenizer, self._task, self._seed = tokenizer, task, config.seed
        chains = held_out_chains(task.held_out, task.max_operations, task.length_decay)
        self._held_out = [self._prompt(index, chain) for index, chain in enumerate(chains)]

    def prompt(self, index: int) -> Prompt:
        task = self._task
        return self._prompt(index, training_chain(self._seed, index, task.max_operations, task.length_decay))

    def held_out(self) -> list[Prompt]:
        return list(self._held_out)

    def _prompt(self, index: int, chain: Chain) -> Prompt:
        text = chain.prompt
        return Prompt(
            index=index,
            prompt_id=hashlib.sha256(text.encode()).hexdigest(),
            text=text,
            token_ids=self._tokenizer.encode(text, opening=True),
            answer=chain.answer,
        )
