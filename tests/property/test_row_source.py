"""The order of training prompts: a permutation in every epoch, and a pure function of seed and index."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from areal_core.config.schema import RunConfig, TaskConfig
from areal_core.environments.row_source import RowSource
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
