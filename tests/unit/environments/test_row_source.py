import json
import logging
from pathlib import Path

import pytest

from areal_core.config.groups import ChatConfig, EnvironmentConfig, TaskConfig
from areal_core.config.schema import RunConfig
from areal_core.environments.census import Reason
from areal_core.environments.row_source import RowSource
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import Tokenizer, char_tokenizer
from tests.support.chat import chat_folder
from tests.support.words import word_tokenizer

SAMPLES = Path(__file__).parents[2] / "data"
OTHER = {"question": "Which number follows on zero?", "answer": 1}


@pytest.fixture
def tokenizer():
    return word_tokenizer()


def task(path=SAMPLES / "questions.jsonl", held_out=SAMPLES / "questions_held_out.jsonl", count=1024, **settings):
    return TaskConfig(
        name="rows",
        path=None if path is None else str(path),
        held_out_path=str(held_out),
        held_out=count,
        **settings,
    )


def opened(tokenizer, *arguments, seed=1, verifier="mathematics", **settings):
    environment = EnvironmentConfig(verifier=verifier)
    return RowSource(RunConfig(task=task(*arguments, **settings), environment=environment, seed=seed), tokenizer)


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def files(folder, *rows):
    """A training file of these rows, and a held-out one of another."""
    return write(folder / "train.jsonl", *rows), write(folder / "test.jsonl", OTHER)


def asked(source):
    """The training prompts, in the order of their texts."""
    return sorted(source.prompt(index).text for index in range(source.census.training.prompts))


def test_the_sample_gives_every_prompt_once_an_epoch_in_a_new_order(tokenizer):
    source = opened(tokenizer)
    first, second = ([source.prompt(6 * epoch + i) for i in range(6)] for epoch in range(2))
    answers = {p.text: p.answer for p in first}
    assert sorted(answers.values()) == sorted(["11", "50", "4,500", "41", "-7", "2.5"])
    assert {p.text for p in second} == set(answers)
    assert [p.text for p in first] != [p.text for p in second]
    assert [p.index for p in first + second] == list(range(12))


def test_any_index_at_any_time_gives_the_same_prompt(tokenizer):
    late = opened(tokenizer).prompt(1000)
    assert opened(tokenizer).prompt(1000) == late
    orders = {tuple(opened(tokenizer, seed=seed).prompt(i).text for i in range(6)) for seed in range(5)}
    assert len(orders) > 1


# -- held-out prompts --------------------------------------------------------------------------------------------------


def test_held_out_prompts_are_the_first_of_their_file(tokenizer):
    assert [p.answer for p in opened(tokenizer).held_out()] == ["36", "5"]
    assert [p.answer for p in opened(tokenizer, count=1, seed=2).held_out()] == ["36"]


def test_a_benchmark_stays_whole(tokenizer, tmp_path):
    row = {"question": "a b", "answer": 1}
    held_out = write(tmp_path / "test", row, row)
    assert len(opened(tokenizer, held_out=held_out, min_prompt_tokens=3).held_out()) == 2


def test_without_a_training_file_there_is_something_to_evaluate(tokenizer):
    source = opened(tokenizer, path=None)
    assert len(source.held_out()) == 2
    assert source.census.training is None


def test_a_held_out_prompt_is_never_trained_on(tokenizer, tmp_path):
    rows = [{"question": f"what is {i} ?", "answer": i} for i in range(4)]
    train = write(tmp_path / "train", {"question": "What  is 0 ?", "answer": 0}, *rows)
    source = opened(tokenizer, train, write(tmp_path / "test", *rows[:2]), count=1)
    assert {source.prompt(i).answer for i in range(20)} == {"2", "3"}
    assert source.census.training.left_out == {Reason.DUPLICATE: 1, Reason.OVERLAPPING: 2}


def test_the_words_of_a_template_are_no_overlap(tokenizer, tmp_path):
    rows = [{"question": f"what is {i} ?", "answer": i} for i in range(3)]
    paths = write(tmp_path / "train", *rows), write(tmp_path / "test", rows[0])
    template = "{{ question }}\nReason step by step, and after that put the answer that you have found into a box."
    assert opened(tokenizer, *paths, prompt_template=template).census.training.prompts == 2


def test_prompts_of_benchmarks_are_not_trained_on(tokenizer, tmp_path):
    paths = files(tmp_path, *({"question": f"q {i}", "answer": i} for i in range(6)))
    one = write(tmp_path / "one.jsonl", {"problem": "Q 1"}, {"prompt": [{"role": "user", "content": "q 2"}]})
    two = write(tmp_path / "two.jsonl", {"question": "q 3"})
    source = opened(tokenizer, *paths, benchmark_paths=f"{one}, {two}")
    assert asked(source) == ["q 0", "q 4", "q 5"]
    write(two, {"question": "q 3"}, {"text": "q 4"})
    said = rf"^task\.benchmark_paths: {two}, line 2: must hold what it asks in one of the fields question, problem, pro"
    with pytest.raises(ConfigError, match=said):
        opened(tokenizer, *paths, benchmark_paths=f"{one},{two}")


def test_files_that_are_the_same_leave_nothing_to_train_on(tokenizer):
    said = r"^task\.path: there is no prompt in .*: 6 rows: 0 prompts; left out: 6 overlapping with held-out prompts$"
    with pytest.raises(ConfigError, match=said):
        opened(tokenizer, held_out=SAMPLES / "questions.jsonl")


# -- filters -----------------------------------------------------------------------------------------------------------


def test_duplicates_are_left_out_after_the_first_that_is_a_prompt(tokenizer, tmp_path):
    rows = [{"question": "a b"}, {"question": "A  B", "answer": 1}, {"question": "a b", "answer": 1}]
    source = opened(tokenizer, *files(tmp_path, *rows))
    assert [source.prompt(i).answer for i in range(2)] == ["1", "1"]
    assert source.census.training.left_out == {Reason.NO_ANSWER: 1, Reason.DUPLICATE: 1}


def test_what_has_another_answer_is_no_duplicate(tokenizer, tmp_path):
    rows = [{"question": question, "answer": answer} for question, answer in (("f ( X )", 1), ("f ( x )", 2))]
    source = opened(tokenizer, *files(tmp_path, *rows, rows[0], {"question": "F ( x )", "answer": 2}))
    assert {source.prompt(i).answer for i in range(2)} == {"1", "2"}
    assert source.census.training.left_out == {Reason.DUPLICATE: 2}


def test_what_differs_in_another_field_of_the_template_is_no_duplicate(tokenizer, tmp_path):
    rows = [{"question": "who?", "about": name, "answer": 1} for name in ("a", "b", "a")]
    templates = {"prompt_template": "{{ question }} {{ about }}", "held_out_prompt_template": "{{ question }}"}
    source = opened(tokenizer, *files(tmp_path, *rows), **templates)
    assert asked(source) == ["who? a", "who? b"]


def test_prompts_have_a_least_length_too(tokenizer, tmp_path):
    rows = [{"question": " ".join("abcd"[:words]), "answer": 1} for words in range(1, 5)]
    source = opened(tokenizer, *files(tmp_path, *rows), min_prompt_tokens=2, max_prompt_tokens=5)
    assert asked(source) == ["a b", "a b c", "a b c d"]
    assert source.census.training.left_out == {Reason.TOO_SHORT: 1}


def test_what_is_never_or_always_solved_is_left_out(tokenizer, tmp_path):
    rows = [{"question": f"q {rate}", "answer": 1, "rate": rate} for rate in (0, 0.5, 1)]
    paths = files(tmp_path, *rows, {"question": "q -", "answer": 1})
    bounds = {"min_success": 0.05, "max_success": 0.95}
    source = opened(tokenizer, *paths, success_field="rate", **bounds)
    assert asked(source) == ["q 0.5"]
    counted = {Reason.TOO_HARD: 1, Reason.TOO_EASY: 1, Reason.NO_RATE: 1}
    assert source.census.training.left_out == counted
    ids = {p.text: p.prompt_id for p in map(opened(tokenizer, *paths).prompt, range(4))}
    rates = write(
        tmp_path / "rates.jsonl",
        {"prompt_id": ids["q 0"], "rate": 0},
        {"prompt_id": ids["q 0.5"], "rate": 0.5},
        {"prompt": "Q 1", "rate": 1},
    )
    source = opened(tokenizer, *paths, success_path=str(rates), **bounds)
    assert (asked(source), source.census.training.left_out) == (["q 0.5"], counted)


# -- bad rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{\n", "not JSON"),
        ("[1]\n", "must be a JSON object"),
        (
            {"answer": "1"},
            "task.prompt_field=question must be text, or messages of a chat that end on the user's, got no",
        ),
        ({"question": None, "answer": "1"}, "task.prompt_field=question must be text"),
        ({"question": "1 ?", "answer": "so\nnone"}, "task.answer_field=answer must hold an answer, or end on one"),
        ({"question": "1 ?", "answer": "(1"}, "task.answer_field=answer must hold an answer, or end on one"),
        ({"question": "1 ?"}, "task.answer_field=answer must be text or a number, got nothing"),
        ({"question": "1 ?", "answer": True}, "task.answer_field=answer must be text or a number, got true"),
        ({"question": "a b c d", "answer": 1}, "a prompt of 4 tokens, more than task.max_prompt_tokens=3"),
        ({"question": "a " * 10**6, "answer": 1}, "a prompt of 1000000 tokens, more than task.max_prompt_tokens=3"),
        ({"question": "\ud800", "answer": 1}, "a text without spelling in UTF-8: "),
        ({"question": "c", "answer": "\ud800"}, "a text without spelling in UTF-8: "),
    ],
)
def test_a_bad_line_is_named_with_its_file(tokenizer, tmp_path, row, message):
    file, held_out = files(tmp_path, {"question": "a b", "answer": 1}, "\n", row)
    with pytest.raises(ConfigError) as caught:
        opened(tokenizer, file, write(held_out, {"question": "x", "answer": 1}), max_prompt_tokens=3, bad_rows="refuse")
    assert str(caught.value).startswith(f"task.path: {file}, line 3: {message}")
    assert "\n" not in str(caught.value)


def test_refusing_bad_rows_refuses_no_filter(tokenizer, tmp_path):
    row = {"question": "a b", "answer": 1}
    assert opened(tokenizer, *files(tmp_path, row, row), bad_rows="refuse").census.training.prompts == 1


def test_a_prompt_that_the_vocabulary_has_not_is_unspellable(tmp_path):
    held_out = write(tmp_path / "test", {"question": "1+1=", "answer": 2}, {"question": "What?", "answer": 1})
    census = opened(char_tokenizer(), None, held_out).census.held_out
    assert census.left_out == {Reason.UNSPELLABLE: 1}
    assert census.bad[0].startswith("line 2: the model's tokenizer can't spell 'What?'")


def test_bad_lines_are_skipped_counted_and_named(tokenizer, tmp_path, caplog):
    bad = [f"[{i}]\n" for i in range(4)]
    row = {"question": "a b", "answer": 1}
    file, held_out = files(tmp_path, row, *bad, {"question": "c", "answer": "\\pi"}, row)
    with caplog.at_level(logging.INFO):
        source = opened(tokenizer, file, held_out)
    assert sorted(source.prompt(index).answer for index in range(2)) == ["1", "\\pi"]
    lines = "; ".join(f"line {number}: must be a JSON object" for number in (2, 3, 4))
    assert caplog.messages == [
        f"task.held_out_path: {held_out}: 1 rows: 1 prompts",
        f"task.path: {file}: 7 rows: 2 prompts; left out: 4 unreadable, 1 duplicate; {lines}; ...",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_the_census_accounts_for_every_row(tokenizer, tmp_path):
    rows = ["{\n", {"question": "a b", "answer": 1}, {"question": "a b", "answer": 1}, OTHER, {"question": "c"}]
    census = opened(tokenizer, *files(tmp_path, *rows)).census.training
    assert (census.path, census.rows, census.prompts) == (str(tmp_path / "train.jsonl"), 5, 1)
    left_out = {Reason.UNREADABLE: 1, Reason.DUPLICATE: 1, Reason.NO_ANSWER: 1, Reason.OVERLAPPING: 1}
    assert census.left_out == left_out
    assert [line.partition(":")[0] for line in census.bad] == ["line 1", "line 5"]


def test_a_file_of_bad_lines_alone_is_refused_with_the_first(tokenizer, tmp_path):
    file = write(tmp_path / "train.jsonl", "[1]\n", "{\n")
    said = (
        r"^task\.path: there is no prompt in .*: 2 rows: 0 prompts; left out: 2 unreadable; line 1: must be a JSON ob"
    )
    with pytest.raises(ConfigError, match=said):
        opened(tokenizer, file)


def test_a_missing_and_an_empty_file_are_named(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"^task\.path: can't read .*absent"):
        opened(tokenizer, tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"^task\.held_out_path: there is no prompt in .*: 0 rows: 0 prompts$"):
        opened(tokenizer, held_out=write(tmp_path / "empty"))


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_of_a_chat_are_fed_as_such_or_as_their_text(tmp_path):
    chatting = Tokenizer.from_folder(chat_folder(tmp_path / "model"))
    fields = {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"}
    settings = {"path": None, "held_out": SAMPLES / "published" / "dapo.jsonl", "max_prompt_tokens": 400, **fields}
    [plain] = opened(chatting, **settings).held_out()
    assert (plain.text, plain.answer) == ("End on the answer.\n\nWhat is $17 \\cdot 3$?", "51")
    assert chatting.decode(plain.token_ids, special=True) == plain.text
    chat = ChatConfig(enabled=True, system="Not this.")
    [chatted] = opened(chatting, **settings, chat=chat).held_out()
    assert (chatted.text, chatted.prompt_id) == (plain.text, plain.prompt_id)
    assert chatting.decode(chatted.token_ids, special=True) == (
        "<|im_start|>system\nEnd on the answer.<|im_end|>\n<|im_start|>user\nWhat is $17 \\cdot 3$?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
