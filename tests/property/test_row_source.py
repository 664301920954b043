"""The order of training prompts is a pure function of seed and index: a permutation of a file in every epoch, and the
ratios of a mixture in every block."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from areal_core.config.groups import TaskConfig
from areal_core.config.schema import RunConfig
from areal_core.environments.row_source import RowSource
from areal_core.environments.source import MixedSource
from tests.support.rollout import Prompts
from tests.support.words import word_tokenizer


def source(folder: Path, count: int, seed: int) -> RowSource:
    for name, rows in (("train", [f"question {i}" for i in range(count)]), ("test", ["another"])):
        (folder / name).write_text("".join(json.dumps({"question": row, "answer": 1}) + "\n" for row in rows))
    task = TaskConfig(name="rows", path=str(folder / "train"), held_out_path=str(folder / "test"))
    return RowSource(RunConfig(task=task, seed=seed), word_tokenizer())


@given(
    count=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10**6),
    asked=st.lists(st.integers(0, 200), max_size=20),
)
def test_order(count: int, seed: int, epoch: int, asked: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, other = (source(Path(folder), count, seed) for _ in range(2))
    for _ in map(one.prompt, asked):
        pass  # what was asked before makes no difference
    indices = range(epoch * count, (epoch + 1) * count)
    prompts = [one.prompt(index) for index in indices]
    assert sorted(prompt.text for prompt in prompts) == sorted(f"question {i}" for i in range(count))
    assert [prompt.index for prompt in prompts] == list(indices)
    assert prompts == [other.prompt(index) for index in reversed(indices)][::-1]


RATIOS = st.fixed_dictionaries({name: st.integers(1, 4) for name in ("b", "a", "c")})


@given(ratios=RATIOS, seed=st.integers(0, 2**40), block=st.integers(0, 10**6))
def test_each_block_has_its_ratios_and_each_task_its_own_order(ratios: dict[str, int], seed: int, block: int) -> None:
    sources, size = dict.fromkeys(ratios, Prompts()), sum(ratios.values())
    one, other = (MixedSource(sources, order, seed) for order in (ratios, dict(sorted(ratios.items()))))
    indices = range(block * size, (block + 2) * size)
    prompts = [one.prompt(index) for index in indices]
    assert prompts == [other.prompt(index) for index in reversed(indices)][::-1]
    assert [prompt.index for prompt in prompts] == list(indices)
    for name, ratio in ratios.items():
        own = [prompt.text for prompt in prompts if prompt.task == name]
        assert own == [f"{index}=" for index in range(block * ratio, (block + 2) * ratio)]
        assert sum(prompt.task == name for prompt in prompts[:size]) == ratio
