"""Files of every format, whole and broken, as numbered rows."""

import codecs
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from areal_core.environments.rows import Row, read_rows
from areal_core.errors import ConfigError

ROWS = [{"question": "a", "extra": {"answer": 1}}, {"question": "b", "extra": {"answer": 2}}]


def read(path):
    return list(read_rows("task.path", str(path)))


def refused(path):
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder, kind):
    """ROWS as a file, or a folder, of this kind."""
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=1)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(file)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    unit = "line" if kind == "jsonl" else "row"
    assert read(write(tmp_path, kind)) == [Row(f"{unit} {number}", row) for number, row in enumerate(ROWS, 1)]


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(b'\n{"a": 1}\r\n   \n{"a": "\xe2\x80\xa8"}')  # a line separator of Unicode ends no row
    assert read(file) == [Row("line 2", {"a": 1}), Row("line 4", {"a": "\u2028"})]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_byte_order_mark_costs_no_row(tmp_path, kind):
    file = write(tmp_path, kind)
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert [(row.fields, row.wrong) for row in read(file)] == [(row, None) for row in ROWS]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 7"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_a_bad_line_spoils_no_other(tmp_path, line, wrong):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    first, bad, last = read(file)
    assert (first.fields, last.fields) == ({"a": 1}, {"a": 2})
    assert (bad.place, bad.fields) == ("line 2", {})
    assert bad.wrong.startswith(wrong)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"data": []}', "{file} must hold a list of JSON objects"),
        (b'{"a": 1}\n{"a": 2}\n', "{file} must be JSON, or end on .jsonl if it holds an object a line: "),
        (b'["\xff"]', "can't read {file}: 'utf-8' codec can't decode"),
    ],
)
def test_a_json_file_is_a_list_of_objects(tmp_path, content, said):
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1}, 2]')
    assert read(file) == [Row("row 1", {"a": 1}), Row("row 2", wrong="must be a JSON object")]
    file.write_bytes(content)
    assert refused(file).startswith(f"task.path: {said.format(file=file)}")


def test_a_file_that_is_absent_or_broken_is_named(tmp_path):
    for name in ("absent.jsonl", "absent.json", "absent.parquet"):
        assert refused(tmp_path / name).startswith(f"task.path: can't read {tmp_path}/{name}: ")
    file = write(tmp_path, "parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert refused(file).startswith(f"task.path: can't read {file}: Parquet magic bytes not found")
    file.write_bytes(whole[:4] + b"\xff" * 56 + whole[60:])  # in the first rows
    assert refused(file).startswith(f"task.path: can't read {file}: ")
    (tmp_path / "folder").mkdir()
    assert "is neither a `Dataset` directory nor" in refused(tmp_path / "folder")
    folder = write(tmp_path, "saved")
    next(folder.glob("*.arrow")).write_bytes(b"nothing")
    assert refused(folder).startswith(f"task.path: can't read {folder}: ")


def test_a_data_set_of_several_splits_needs_a_name(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    both = f"{tmp_path}/both"
    assert refused(both) == f"task.path: {both} holds several splits; name one of them: {both}/train, {both}/test"
    assert [row.fields for row in read(f"{both}/test")] == ROWS


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with the data set owner/tiny, as `datasets.load_dataset` leaves it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner___tiny").mkdir()
    (tmp_path / "owner___tiny" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.load_dataset(str(tmp_path / "owner___tiny"), cache_dir=str(tmp_path / "cache"))
    [arrow] = (tmp_path / "cache").rglob("*.arrow")
    arrow.rename(arrow.with_name("tiny-train.arrow"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("cache")
def test_a_data_set_of_the_hub_is_read_from_the_cache():
    for name in ("datasets:owner/tiny:train", "datasets:owner/tiny:default:train"):
        assert [row.fields for row in read(name)] == ROWS
    for name, call in (
        ("datasets:owner/tiny:test", "datasets.load_dataset('owner/tiny')"),
        ("datasets:owner/tiny:other:train", "datasets.load_dataset('owner/tiny', 'other')"),
        ("datasets:owner/other:train", "datasets.load_dataset('owner/other')"),
    ):
        assert refused(name).startswith(f"task.path: {name} is not in the cache of this machine, which {call} fills: ")


@pytest.mark.parametrize("name", ["datasets:owner/tiny", "datasets:a/b::train", "datasets:a/b:c:d:e"])
def test_the_name_of_a_data_set_has_a_split(name):
    assert refused(name).startswith(f"task.path: {name} must be of the form datasets:owner/name:split, or ")
