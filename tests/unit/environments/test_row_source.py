"""Prompts of files: which rows become prompts, in which order, and what the others are counted as."""

import json
import logging
from pathlib import Path

import pytest

from areal_core.config.groups import EnvironmentConfig, TaskConfig
from areal_core.config.schema import RunConfig
from areal_core.environments.row_source import Reason, RowSource, overlapping
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import char_tokenizer
from areal_core.rewards.remote import decode_work, encode_work
from areal_core.rewards.worker import GroupMessage
from tests.support.words import word_tokenizer

SAMPLES = Path(__file__).parents[2] / "data"
OTHER = {"question": "Which number follows on zero?", "answer": 1}


@pytest.fixture
def tokenizer():
    return word_tokenizer()


def opened(tokenizer, path=SAMPLES / "questions.jsonl", held_out=SAMPLES / "questions_held_out.jsonl", **settings):
    seed = settings.pop("seed", 1)
    files = {"path": None if path is None else str(path), "held_out_path": str(held_out)}
    task = TaskConfig(name="rows", held_out=settings.pop("count", 1024), **files, **settings)
    environment = EnvironmentConfig(verifier="mathematics")
    return RowSource(RunConfig(task=task, environment=environment, seed=seed), tokenizer)


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def files(folder, *rows):
    """A training file of these rows, and a held-out one of another."""
    return write(folder / "train.jsonl", *rows), write(folder / "test.jsonl", OTHER)


def row(question, answer=1, **fields):
    return {"question": question, "answer": answer, **fields}


def test_held_out_prompts_are_the_first_of_their_file(tokenizer, tmp_path):
    assert [prompt.answer for prompt in opened(tokenizer).held_out()] == ["36", "5"]
    assert [prompt.answer for prompt in opened(tokenizer, count=1, seed=2).held_out()] == ["36"]
    alone = opened(tokenizer, None, write(tmp_path / "test", row("a b"), row("a b")))  # a benchmark stays whole
    assert (len(alone.held_out()), alone.report.training) == (2, None)


def test_a_prompt_has_its_whole_row(tokenizer, tmp_path):
    known = row("what is it ?", level=3, tags=["a", None, 2.5, True], nested={"size": 2**70, "half": "\ud800"})
    deep = row("and this ?", nested=json.loads("[" * 40 + "]" * 40))
    source = opened(tokenizer, *files(tmp_path, known, deep))
    prompt = source.prompt(0)
    assert prompt.row == known | {"nested": {"size": str(2**70), "half": "?"}}
    work = GroupMessage(prompt=prompt, completions=[])
    assert decode_work(encode_work(1, work)) == (1, work)  # on another machine
    assert source.report.training.left_out == {Reason.UNREADABLE: 1}
    assert source.report.training.bad == ["line 2: lists and objects nested more than 32 levels deep"]


def test_a_held_out_prompt_is_never_trained_on(tokenizer, tmp_path):
    rows = [row(f"what is {i} ?", i) for i in range(4)]
    train = write(tmp_path / "train", row("What  is 0 ?", 0), *rows)
    source = opened(tokenizer, train, write(tmp_path / "test", *rows[:2]))
    assert {source.prompt(i).answer for i in range(20)} == {"2", "3"}
    assert source.report.training.left_out == {Reason.DUPLICATE: 1, Reason.OVERLAPPING: 2}
    template = "{{ question }}\nReason step by step, and after that put the answer that you have found into a box."
    worded = opened(tokenizer, train, write(tmp_path / "test", rows[0]), prompt_template=template)
    assert worded.report.training.prompts == 3  # the words of a template are no overlap


NO_ANSWER = {"question": "a b"}
TEMPLATES = {"prompt_template": "{{ question }} {{ about }}", "held_out_prompt_template": "{{ question }}"}


@pytest.mark.parametrize(
    ("rows", "settings", "prompts", "left_out"),
    [
        ([NO_ANSWER, row("A  B"), row("a b")], {}, ["A  B"], {Reason.NO_ANSWER: 1, Reason.DUPLICATE: 1}),
        # Another answer, or another field of the template, makes another prompt.
        ([row("f ( X )", 1), row("f ( x )", 2), row("f ( X )", 1)], {}, ["f ( X )", "f ( x )"], {Reason.DUPLICATE: 1}),
        ([row("who?", about=name) for name in "aba"], TEMPLATES, ["who? a", "who? b"], {Reason.DUPLICATE: 1}),
        (
            [row(" ".join("abcdef"[:words])) for words in range(1, 7)],
            {"max_prompt_tokens": 5},
            ["a", "a b", "a b c", "a b c d", "a b c d e"],
            {Reason.TOO_LONG: 1},
        ),
        (["{\n", row("a b"), row("a b"), OTHER, {"question": "c"}], {}, ["a b"],
         {Reason.UNREADABLE: 1, Reason.DUPLICATE: 1, Reason.NO_ANSWER: 1, Reason.OVERLAPPING: 1}),
    ],
)  # fmt: skip
def test_rows_that_are_no_prompts_are_counted_by_reason(tokenizer, tmp_path, rows, settings, prompts, left_out):
    source = opened(tokenizer, *files(tmp_path, *rows), **settings)
    report = source.report.training
    assert sorted(source.prompt(index).text for index in range(report.prompts)) == prompts
    assert report.left_out == left_out
    assert (report.path, report.rows, report.prompts) == (str(tmp_path / "train.jsonl"), len(rows), len(prompts))


def test_a_prompt_beyond_the_vocabulary_is_not_encodable(tmp_path):
    held_out = write(tmp_path / "test", row("1+1=", 2), row("What?"))
    report = opened(char_tokenizer(), None, held_out).report.held_out
    assert report.left_out == {Reason.UNENCODABLE: 1}
    assert report.bad[0].startswith("line 2: the model's tokenizer can't encode 'What?'")


def test_bad_lines_are_skipped_and_the_first_are_named_in_a_warning(tokenizer, tmp_path, caplog):
    bad = [f"[{i}]\n" for i in range(4)]
    file, held_out = files(tmp_path, row("a b"), *bad, row("c", "\\pi"), row("a b"), row("d", "\ud800"))
    with caplog.at_level(logging.INFO):
        source = opened(tokenizer, file, held_out)
    assert sorted(source.prompt(index).answer for index in range(2)) == ["1", "\\pi"]
    lines = "; ".join(f"line {number}: must be a JSON object" for number in (2, 3, 4))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages[1].endswith(
        f"2 prompts; left out: 4 unreadable, 1 duplicate, 1 without answer; {lines}; ..."
    )


@pytest.mark.parametrize(
    ("rows", "held_out", "said"),
    [
        (None, [OTHER], r"task\.path: can't read .*train"),
        ([OTHER], [], r"task\.held_out_path: no usable prompt in .*: 0 rows: 0 prompts$"),
        (["[1]\n", "{\n"], [OTHER], r"task\.path: no usable .*: 2 rows: .*; left out: 2 unreadable; line 1: must be"),
        ([OTHER], [OTHER], r"task\.path: no usable .*: 1 rows: 0 prompts; left out: 1 overlapping with held-out pro"),
    ],
)
def test_files_without_a_prompt_are_refused(tokenizer, tmp_path, rows, held_out, said):
    if rows is not None:
        write(tmp_path / "train", *rows)
    with pytest.raises(ConfigError, match=f"^{said}"):
        opened(tokenizer, tmp_path / "train", write(tmp_path / "test", *held_out))


THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    ("text", "overlaps"),
    [
        ("What is  X?", True),
        ("What is x!", False),
        (f"Well, {THIRTEEN.upper()}.", True),
        (THIRTEEN.replace(" seven", ", (seven)"), True),
        (THIRTEEN.removesuffix(" thirteen"), False),
    ],
)
def test_equal_texts_and_runs_of_thirteen_words_overlap(text, overlaps):
    assert overlapping([text, "something else"], ["what is x?", f"so {THIRTEEN}"]) == [overlaps, False]


def test_a_run_that_more_than_ten_texts_have_says_nothing():
    wording = "Work through this step by step and write down what it comes to at the very end:"
    questions = [f"{wording} {number}?" for number in range(11)]
    assert overlapping(questions, [f"{wording} 99?"]) == [False] * 11
    assert overlapping(questions[:10], [f"{wording} 99?"]) == [True] * 10
    assert overlapping(questions, [questions[3]]) == [number == 3 for number in range(11)]
