import random
from collections import Counter

import pytest

from areal_core.config.schema import load
from areal_core.environments.arithmetic import ArithmeticSource, Chain, draw, held_out_chains, training_chain
from areal_core.environments.datasets import is_held_out
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import char_tokenizer


def test_the_worked_solution_is_right_at_every_step():
    chain = Chain((1, 1, 7), "--")
    assert (chain.prompt, chain.worked, chain.direct, chain.answer) == ("1-1-7=", "1-1=0;0-7=3#3", "#3", "3")
    rng = random.Random(0)
    for _ in range(200):
        chain = draw(rng, max_operations=16, decay=0.85)
        steps, _, answer = chain.worked.partition("#")
        value = str(chain.digits[0])
        for step, operator, digit in zip(steps.split(";"), chain.operators, chain.digits[1:], strict=True):
            left, _, result = step.partition("=")
            assert left == f"{value}{operator}{digit}"
            assert int(result) == eval(left) % 10
            value = result
        assert answer == value == chain.answer


def test_lengths_are_geometric_up_to_the_limit():
    rng = random.Random(1)
    counts = Counter(len(draw(rng, max_operations=3, decay=0.5).operators) for _ in range(7000))
    assert set(counts) == {1, 2, 3}
    for operations, expected in ((1, 4000), (2, 2000), (3, 1000)):
        assert counts[operations] == pytest.approx(expected, rel=0.1)


def test_training_sees_no_held_out_prompt():
    prompts = {training_chain(1, i, 4, 0.85).prompt for i in range(3000)}
    assert not any(map(is_held_out, prompts))
    assert not prompts & {chain.prompt for chain in held_out_chains(1024, 4, 0.85)}
    texts = [draw(random.Random(seed), 16, 1.0).prompt for seed in range(5000)]
    assert sum(map(is_held_out, texts)) / len(texts) == pytest.approx(0.1, abs=0.015)


def test_held_out_chains_are_distinct_and_a_shorter_list_is_their_beginning():
    chains = held_out_chains(1024, 16, 0.85)
    assert len({chain.prompt for chain in chains}) == 1024
    assert held_out_chains(100, 16, 0.85) == chains[:100]
    with pytest.raises(ConfigError, match=r"^task\.held_out: .*max_operations=1"):
        held_out_chains(1024, 1, 0.85)


def test_longest_prompt_must_fit():
    config = load({"seed": 3, "task": {"held_out": 8, "max_prompt_tokens": 34}})
    assert ArithmeticSource(config, char_tokenizer()).prompt(5).text == training_chain(3, 5, 16, 0.85).prompt
    with pytest.raises(ConfigError, match=r"^task\.max_prompt_tokens: must be at least 34 .*got 33"):
        ArithmeticSource(load({"task": {"held_out": 8, "max_prompt_tokens": 33}}), char_tokenizer())
