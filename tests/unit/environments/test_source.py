import pytest

from areal_core.config.schema import load
from areal_core.environments.arithmetic import training_chain
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import char_tokenizer


def test_arithmetic_prompts_carry_text_tokens_and_gold_answer():
    tokenizer = char_tokenizer()
    source = open_source(load({"seed": 3, "task": {"held_out": 8}}), tokenizer)
    prompt, chain = source.prompt(5), training_chain(3, 5, 16, 0.85)
    assert (prompt.index, prompt.text, prompt.answer) == (5, chain.prompt, chain.answer)
    assert prompt.token_ids == tokenizer.encode(chain.prompt)


def test_the_longest_arithmetic_prompt_must_fit():
    open_source(load({"task": {"held_out": 8, "max_prompt_tokens": 34}}), char_tokenizer())
    with pytest.raises(ConfigError, match=r"^task\.max_prompt_tokens: must be at least 34 .*got 33"):
        open_source(load({"task": {"held_out": 8, "max_prompt_tokens": 33}}), char_tokenizer())
