"""Scores from records, by hand, and the files of records, found again however their process ended."""

import re
from contextlib import nullcontext

import pytest

from areal_core.errors import ConfigError, StorageError
from areal_core.evaluation.scores import Record, RecordFile, Sample, compared, read_records, scored, write_page
from areal_core.types import Outcome

RIGHT, WRONG, NONE, FAILED = Outcome.CORRECT, Outcome.INCORRECT, Outcome.NO_ANSWER, Outcome.FAILED


def sample(outcome, answer=None, *, tokens=10, truncated=False, text="text"):
    score = None if outcome is Outcome.FAILED else float(outcome is RIGHT)
    return Sample(text=text, tokens=tokens, truncated=truncated, outcome=outcome, score=score, answer=answer)


def record(problem, greedy=RIGHT, *samples):
    sampled = [sample(*one) if isinstance(one, tuple) else sample(one) for one in samples]
    return Record(
        problem=problem, prompt_id=f"{problem}", prompt=f"<|user|>{problem}?\u2028", gold="4",
        greedy=sample(greedy), samples=tuple(sampled),
    )  # fmt: skip


RECORDS = [
    record(0, RIGHT, (RIGHT, "4"), (RIGHT, "4"), (WRONG, "5"), (WRONG, "6")),
    record(1, WRONG, (WRONG, "5"), (WRONG, "5"), (WRONG, "5"), (RIGHT, "4")),
    record(2, FAILED, (RIGHT, "4"), (RIGHT, "4"), (RIGHT, "4"), FAILED),
    record(3, NONE, FAILED, FAILED, FAILED, FAILED),
]


def test_scores_are_means_over_problems():
    scores = scored(RECORDS)
    assert (scores.problems, scores.samples, scores.completions) == (4, 4, 20)
    assert scores.greedy.value == 1 / 4
    assert scores.pass_at[1].value == pytest.approx((2 / 4 + 1 / 4 + 3 / 4) / 4)
    assert scores.pass_at[2].value == pytest.approx((5 / 6 + 1 / 2 + 1) / 4)
    assert scores.pass_at[4].value == 3 / 4
    assert list(scores.pass_at) == [1, 2, 4]
    assert {k: value.value for k, value in scores.majority_at.items()} == {4: 2 / 4}
    assert scores.outcomes == {RIGHT: 7, WRONG: 6, NONE: 1, FAILED: 6}
    assert scores.pass_at[1].low < scores.pass_at[1].value < scores.pass_at[1].high


def test_without_samples_there_is_less_to_tell():
    greedy = scored([record(0, RIGHT), record(1, WRONG)])
    assert (greedy.greedy.value, greedy.pass_at, greedy.majority_at) == (0.5, {}, {})
    assert scored([record(0, FAILED)]).greedy.value == 0.0
    long = sample(WRONG, tokens=30, truncated=True)
    scores = scored([Record(problem=0, prompt_id="0", prompt="?", gold="4", greedy=long, samples=(sample(RIGHT),))])
    assert (scores.truncated, scores.mean_tokens) == (1, 20.0)
    assert (scores.metrics()["truncated"], scores.metrics()["outcome_correct"]) == (0.5, 0.5)


def test_two_models_are_compared_problem_by_problem():
    better = [record(p, RIGHT, RIGHT, RIGHT) for p in range(20)]
    worse = [record(p, WRONG if p < 10 else RIGHT, RIGHT, WRONG) for p in range(20)]
    found = compared(better, worse)
    assert (found["greedy"].value, found["pass_at_1"].value) == (0.5, 0.5)
    assert compared(worse, better)["greedy"].value == -0.5
    assert list(compared([record(0, RIGHT)], [record(0, WRONG)])) == ["greedy"]
    assert compared([record(0, FAILED)], [record(0, RIGHT)])["greedy"].value == -1.0
    with pytest.raises(ConfigError, match="the same problems"):
        compared([record(0, RIGHT)], [record(1, RIGHT)])


def test_the_page_shows_every_problem_and_escapes_what_was_written(tmp_path):
    hostile = Record(
        problem=7, prompt_id="7", prompt="<|im_start|>user", gold="<b>4</b>",
        greedy=sample(WRONG, "<i>", text="<script>alert(1)</script>\n\tdone\x1b \u202e"), samples=(sample(RIGHT, "4"),),
    )  # fmt: skip
    write_page(tmp_path / "page.html", "m: b", [*RECORDS, hostile], scored([hostile]))
    page = (tmp_path / "page.html").read_text()
    assert page.count("<details") == 5
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert "\n\tdone\\x1b \\u202e</pre>" in page
    assert "&lt;|im_start|&gt;user" in page
    assert "pass@1, 1 samples" in page
    assert '<span class="mark correct">' in page
    assert {"correct"} <= set(re.findall(r"\.mark\.(\w+)", page)) <= set(Outcome)  # those that have a colour


ABOUT = {"benchmark": {"name": "b", "problems": 2}, "seed": 1, "task": {"chat": {"system": None}}}


def written(file, *problems):
    """The bytes of a file of these problems' records."""
    with RecordFile(file, ABOUT) as records:
        for problem in problems:
            records.add(record(problem))
    return file.read_bytes()


@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("torn", [False, True], ids=["cut off", "zeros"])
def test_records_from_a_damaged_line_on_are_dropped_and_written_again(tmp_path, damaged, torn):
    """A process that is killed cuts the last line off; a machine that loses power may leave zeros anywhere."""
    file = tmp_path / "b.jsonl"
    whole = written(file, 0, 1)
    lines = whole.splitlines(keepends=True)
    lines[damaged:] = [bytes(len(lines[damaged]) - 1) + b"\n", *lines[damaged + 1 :]] if torn else [lines[damaged][:-1]]
    file.write_bytes(b"".join(lines))
    with pytest.raises(StorageError) if torn and damaged else nullcontext():
        read_records(file)
    with RecordFile(file, ABOUT) as again:
        assert again.records == [record(problem) for problem in range(damaged - 1)]
    assert written(file, *range(max(0, damaged - 1), 2)) == whole
    assert read_records(file) == [record(0), record(1)]


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({**ABOUT, "seed": 2}, r"seed: must be 1 as in the records of .*, got 2"),
        ({**ABOUT, "task": {"chat": {"system": "Hi."}}}, r"task\.chat\.system: must be null as in .*, got 'Hi\.'"),
        ({**ABOUT, "more": True}, r"more: must be null as in .*, got true"),
    ],
)
def test_records_of_another_evaluation_are_refused_and_kept(tmp_path, about, told):
    file = tmp_path / "b.jsonl"
    before = written(file, 0)
    with pytest.raises(ConfigError, match=f"^{told}; use the value of the records, or choose another --name"):
        RecordFile(file, about)
    assert file.read_bytes() == before
