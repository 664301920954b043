"""Questions about cities: prompts by seed and index, none of them held out, and their verifier."""

from pathlib import Path

import pytest

from areal_core.config.groups import TaskConfig
from areal_core.config.schema import RunConfig
from areal_core.environments.cities import Cities, only_city
from areal_core.environments.datasets import is_held_out
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt
from tests.support.chat import chat_folder


def test_prompts_are_functions_of_seed_and_index_and_none_is_held_out(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(chat_folder(tmp_path))
    config = RunConfig(task=TaskConfig(held_out=20), seed=1)
    source, again = Cities(config, tokenizer), Cities(config, tokenizer)
    prompts, held_out = [source.prompt(index) for index in range(40)], source.held_out()
    assert [again.prompt(index) for index in reversed(range(40))] == prompts[::-1]
    assert again.held_out() == held_out
    assert len({prompt.text for prompt in held_out}) == 20
    assert all(is_held_out(prompt.text) for prompt in held_out)
    assert not any(is_held_out(prompt.text) for prompt in prompts)
    person = [prompt.text.split("Where does ")[1].split()[0] for prompt in prompts]
    assert all(f"{name} lives in {prompt.answer}." in prompt.text for name, prompt in zip(person, prompts, strict=True))


@pytest.mark.parametrize(
    ("completion", "score"),
    [("Oslo", 1), ("Ann lives in Oslo.", 1), ("Oslo or Rome", 0), ("Rome", 0), ("oslo", 0), ("", 0)],
)
def test_only_the_gold_city_alone_is_correct(completion: str, score: float) -> None:
    task = Prompt(index=0, prompt_id="", text="", token_ids=(), answer="Oslo")
    assert only_city(task, completion) == score
