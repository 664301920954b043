"""Records of an evaluation: a line a problem, found again, however its process ended."""

import pytest

from areal_core.errors import ConfigError, StorageError
from areal_core.evaluation.records import Record, RecordFile, Sample, read_records
from areal_core.types import Outcome

ABOUT = {"benchmark": {"name": "b", "problems": 2}, "seed": 1, "task": {"chat": {"system": None}}}


def sample(outcome=Outcome.CORRECT, text="4", **more):
    score = {Outcome.CORRECT: 1.0, Outcome.FAILED: None, Outcome.TIMED_OUT: None}.get(outcome, 0.0)
    return Sample(
        **{"text": text, "tokens": 2, "truncated": False, "outcome": outcome, "score": score, "answer": text, **more}
    )


def record(problem, greedy=Outcome.CORRECT, samples=()):
    return Record(
        problem=problem,
        prompt_id=f"id-{problem}",
        prompt=f"2 + {problem} =\u2028",
        gold="4",
        greedy=sample(greedy),
        samples=tuple(sample(outcome) for outcome in samples),
    )


def written(file, *problems, synced=True):
    """The bytes of a file of these problems' records."""
    with RecordFile(file, ABOUT, synced=synced) as records:
        for problem in problems:
            records.add(record(problem))
    return file.read_bytes()


@pytest.mark.parametrize("lost", [1, 30])
def test_a_line_that_was_cut_off_is_dropped_and_written_again(tmp_path, lost):
    file = tmp_path / "b.jsonl"
    whole = written(file, 0, 1)
    file.write_bytes(whole[:-lost])
    with RecordFile(file, ABOUT) as again:
        assert again.records == [record(0)]
    assert written(file, 1) == whole
    assert read_records(file) == [record(0), record(1)]
    file.write_bytes(b'{"benchm')
    assert written(file, 0, 1) == whole


@pytest.mark.parametrize("torn", [0, 1])
def test_a_torn_file_is_begun_anew_where_nothing_is_synced(tmp_path, torn):
    file = tmp_path / "b.jsonl"
    whole = written(file, 0, 1, synced=False)
    lines = whole.splitlines(keepends=True)
    lines[torn] = bytes(len(lines[torn]) - 1) + b"\n"
    file.write_bytes(b"".join(lines))
    with pytest.raises(StorageError):
        RecordFile(file, ABOUT)
    assert written(file, 0, 1, synced=False) == whole
    with pytest.raises(ConfigError, match="seed"):
        RecordFile(file, {**ABOUT, "seed": 2}, synced=False)


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({**ABOUT, "seed": 2}, r"seed: .* holds records with 1, got 2"),
        ({**ABOUT, "task": {"chat": {"system": "Hi."}}}, r"task\.chat\.system: .* with None, got 'Hi\.'"),
        ({**ABOUT, "more": True}, r"more: .* with None, got True"),
    ],
)
def test_records_of_another_evaluation_are_refused_and_kept(tmp_path, about, told):
    file = tmp_path / "b.jsonl"
    before = written(file, 0)
    with pytest.raises(ConfigError, match=f"^{told}; another --name keeps both"):
        RecordFile(file, about)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"nonsense\n", b"[1]\n", b'{"seed":1}\n{"problem":0}\n'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    file = tmp_path / "b.jsonl"
    file.write_bytes(content)
    with pytest.raises((StorageError, ConfigError), match=r"b\.jsonl"):
        RecordFile(file, {"seed": 1})
    assert file.read_bytes() == content
