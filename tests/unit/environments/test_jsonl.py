import json
from pathlib import Path

import pytest
import tokenizers

from areal_core.config.schema import TaskConfig
from areal_core.environments.jsonl import JsonlSource
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import Tokenizer

SAMPLES = Path(__file__).parents[2] / "data"


@pytest.fixture
def tokenizer():
    """A token per word; every word is the unknown one."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


def task(path=SAMPLES / "questions.jsonl", held_out=SAMPLES / "questions_held_out.jsonl", count=1024, **settings):
    return TaskConfig(name="jsonl", path=str(path), held_out_path=str(held_out), held_out=count, **settings)


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_the_sample_gives_every_prompt_once_an_epoch_in_a_new_order(tokenizer):
    source = JsonlSource(task(), tokenizer, seed=1)
    first, second = ([source.prompt(6 * epoch + i) for i in range(6)] for epoch in range(2))
    answers = {p.text: p.answer for p in first}
    assert sorted(answers.values()) == sorted(["11", "50", "4,500", "41", "-7", "2.5"])
    assert {p.text for p in second} == set(answers)
    assert [p.text for p in first] != [p.text for p in second]
    assert [p.index for p in first + second] == list(range(12))


def test_any_index_at_any_time_gives_the_same_prompt(tokenizer):
    source = JsonlSource(task(), tokenizer, seed=1)
    late = source.prompt(1000)
    assert JsonlSource(task(), tokenizer, seed=1).prompt(1000) == late
    orders = {tuple(JsonlSource(task(), tokenizer, seed=s).prompt(i).text for i in range(6)) for s in range(5)}
    assert len(orders) > 1


def test_held_out_prompts_are_the_first_of_their_file(tokenizer):
    assert [p.answer for p in JsonlSource(task(), tokenizer, seed=1).held_out()] == ["36", "5"]
    assert [p.answer for p in JsonlSource(task(count=1), tokenizer, seed=2).held_out()] == ["36"]


def test_a_held_out_prompt_is_never_trained_on(tokenizer, tmp_path):
    rows = [{"question": f"what is {i} ?", "answer": i} for i in range(4)]
    files = write(tmp_path / "train", *rows), write(tmp_path / "test", *rows[:2])
    source = JsonlSource(task(*files, count=1), tokenizer, seed=1)
    assert {source.prompt(i).answer for i in range(20)} == {"2", "3"}


def test_files_that_are_the_same_leave_nothing_to_train_on(tokenizer):
    with pytest.raises(ConfigError, match=r"^task\.path: every prompt"):
        JsonlSource(task(held_out=SAMPLES / "questions.jsonl"), tokenizer, seed=1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{\n", "not JSON"),
        ("[1]\n", "must be a JSON object"),
        ({"answer": "1"}, "task.prompt_field=question must be text"),
        ({"question": "1 ?", "answer": "so\nnone"}, "task.answer_field=answer must hold an answer, or end on one"),
        ({"question": "1 ?", "answer": "(1"}, "task.answer_field=answer must hold an answer, or end on one"),
        ({"question": "1 ?"}, "task.answer_field=answer must be text or a number"),
        ({"question": "a b c d", "answer": 1}, "a prompt of 4 tokens, more than task.max_prompt_tokens=3"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tokenizer, tmp_path, row, message):
    file = write(tmp_path / "train.jsonl", {"question": "a b", "answer": 1}, "\n", row)
    held_out = write(tmp_path / "test.jsonl", {"question": "a", "answer": 1})
    with pytest.raises(ConfigError) as caught:
        JsonlSource(task(file, held_out, max_prompt_tokens=3, bad_rows="refuse"), tokenizer, seed=1)
    assert str(caught.value).startswith(f"task.path: {file}, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_lines_are_skipped_counted_and_named(tokenizer, tmp_path, caplog):
    bad = [f"[{i}]\n" for i in range(4)]
    file = write(tmp_path / "train.jsonl", {"question": "a b", "answer": 1}, *bad, {"question": "c", "answer": "\\pi"})
    held_out = write(tmp_path / "test.jsonl", {"question": "a", "answer": 1})
    source = JsonlSource(task(file, held_out), tokenizer, seed=1)
    assert sorted(source.prompt(index).answer for index in range(2)) == ["1", "\\pi"]
    lines = "; ".join(f"line {number}: must be a JSON object" for number in (2, 3, 4))
    assert caplog.messages == [f"task.path: {file}: 4 of 6 rows are skipped: {lines}; ..."]


def test_a_file_of_bad_lines_alone_is_refused_with_the_first(tokenizer, tmp_path):
    file = write(tmp_path / "train.jsonl", "[1]\n", "{\n")
    with pytest.raises(ConfigError, match=r"^task\.path: .* holds no prompt; line 1: must be a JSON object$"):
        JsonlSource(task(file), tokenizer, seed=1)


def test_a_missing_and_an_empty_file_are_named(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"^task\.path: can't read .*absent"):
        JsonlSource(task(tmp_path / "absent"), tokenizer, seed=1)
    with pytest.raises(ConfigError, match=r"^task\.held_out_path: .* holds no prompt"):
        JsonlSource(task(held_out=write(tmp_path / "empty")), tokenizer, seed=1)
