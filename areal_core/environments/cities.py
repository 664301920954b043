"""Questions in sentences about who lives where, for small pretrained models: the experiment `smollm2-small`."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace

from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import SEED, is_held_out, reserved
from areal_core.environments.dialogue import Dialogue
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt

_PEOPLE = ["Ann", "Ben", "Eva", "Ida", "Ines", "Leo", "Max", "Mia", "Omar", "Sam", "Tom", "Zoe"]
_CITIES = ["Athens", "Berlin", "Cairo", "Delhi", "Dublin", "Lima", "Lyon", "Madrid", "Oslo", "Paris", "Rome", "Tokyo"]


class Cities:
    """An endless stream of prompts, pure functions of (seed, index). Some, chosen by hash, are held out of training."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._config, self._dialogue = config, Dialogue(config.task.chat, tokenizer)

    def prompt(self, index: int) -> Prompt:
        draw = random.Random(f"{self._config.seed}/{index}")
        return next(prompt for prompt in self._drawn(draw, index) if not is_held_out(prompt.text))

    def held_out(self) -> list[Prompt]:
        drawn = ((prompt.text, prompt) for prompt in self._drawn(random.Random(SEED), 0))
        return [replace(prompt, index=i) for i, prompt in enumerate(reserved(drawn, self._config.task.held_out))]

    def _drawn(self, draw: random.Random, index: int) -> Iterator[Prompt]:
        while True:
            people, cities, asked = draw.sample(_PEOPLE, 3), draw.sample(_CITIES, 3), draw.randrange(3)
            told = " ".join(f"{person} lives in {city}." for person, city in zip(people, cities, strict=True))
            text = f"{told} Where does {people[asked]} live? Answer with one word."
            digest, tokens = hashlib.sha256(text.encode()).hexdigest(), self._dialogue.prompt(text)
            yield Prompt(index=index, prompt_id=digest, text=text, token_ids=tokens, answer=cities[asked])


def only_city(task: Prompt, completion: str) -> float:
    """Score 1 if the completion names the gold city and no other one, else 0."""
    return float([city for city in _CITIES if city in completion] == [task.answer])
