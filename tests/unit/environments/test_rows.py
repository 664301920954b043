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


def lines(folder):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def listed(folder):
    file = folder / "rows.json"
    file.write_text(json.dumps(ROWS))
    return file


def columns(folder):
    file = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=1)
    return file


def saved(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "rows")
    return folder / "rows"


@pytest.mark.parametrize("write", [lines, listed, columns, saved])
def test_every_format_gives_the_same_rows(tmp_path, write):
    found = read(write(tmp_path))
    assert [row.fields for row in found] == ROWS
    unit = "line" if write is lines else "row"
    assert [row.place for row in found] == [f"{unit} 1", f"{unit} 2"]
    assert [row.wrong for row in found] == [None, None]


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(b'\n{"a": 1}\r\n   \n{"a": "\xe2\x80\xa8"}')  # a line separator of Unicode ends no row
    assert read(file) == [Row("line 2", {"a": 1}), Row("line 4", {"a": "\u2028"})]


@pytest.mark.parametrize("write", [lines, listed])
def test_a_byte_order_mark_costs_no_row(tmp_path, write):
    file = write(tmp_path)
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert [(row.fields, row.wrong) for row in read(file)] == [(row, None) for row in ROWS]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 7"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit (4300 digits)"),
        (b"\xef\xbb\xbf{}", "not JSON: Unexpected UTF-8 BOM"),
    ],
)
def test_a_bad_line_spoils_no_other(tmp_path, line, wrong):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    first, bad, last = read(file)
    assert (first.fields, last.fields) == ({"a": 1}, {"a": 2})
    assert (bad.place, bad.fields) == ("line 2", {})
    assert bad.wrong.startswith(wrong)


def test_a_json_file_is_a_list_of_objects(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1}, 2]')
    assert read(file) == [Row("row 1", {"a": 1}), Row("row 2", wrong="must be a JSON object")]
    file.write_text('{"data": []}')
    assert refused(file) == f"task.path: {file} must hold a list of JSON objects"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert refused(file).startswith(f"task.path: {file} must be JSON, or end on .jsonl if it holds an object a line: ")
    file.write_bytes(b'["\xff"]')
    assert refused(file).startswith(f"task.path: can't read {file}: 'utf-8' codec can't decode")


def test_what_is_absent_or_broken_is_named(tmp_path):
    for name in ("absent.jsonl", "absent.json", "absent.parquet"):
        assert refused(tmp_path / name).startswith(f"task.path: can't read {tmp_path}/{name}: ")
    whole = columns(tmp_path)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(whole.read_bytes()[:-20])
    assert refused(broken).startswith(f"task.path: can't read {broken}: Parquet magic bytes not found")
    (tmp_path / "folder").mkdir()
    assert "is neither a `Dataset` directory nor" in refused(tmp_path / "folder")
    folder = saved(tmp_path)
    next(folder.glob("*.arrow")).write_bytes(b"nothing")
    assert refused(folder).startswith(f"task.path: can't read {folder}: ")


def test_a_parquet_file_that_breaks_in_its_middle_is_named(tmp_path):
    file = columns(tmp_path)
    data = bytearray(file.read_bytes())
    data[4:60] = b"\xff" * 56
    file.write_bytes(data)
    assert refused(file).startswith(f"task.path: can't read {file}: ")


def test_of_several_splits_one_is_to_be_named(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    both = f"{tmp_path}/both"
    assert refused(both) == f"task.path: {both} holds several splits; name one of them: {both}/train, {both}/test"
    assert [row.fields for row in read(f"{both}/test")] == ROWS


# -- the cache of the Hub's data sets ----------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("datasets:owner/tiny:test", "datasets.load_dataset('owner/tiny')"),
        ("datasets:owner/tiny:other:train", "datasets.load_dataset('owner/tiny', 'other')"),
        ("datasets:owner/other:train", "datasets.load_dataset('owner/other')"),
    ],
)
def test_what_the_cache_has_not_is_one_line(name, call):
    assert refused(name).startswith(f"task.path: {name} is not in the cache of this machine, which {call} fills: ")


@pytest.mark.parametrize("name", ["datasets:owner/tiny", "datasets:", "datasets:a/b::train", "datasets:a/b:c:d:e"])
def test_the_name_of_a_data_set_has_a_split(name):
    assert refused(name).startswith(f"task.path: {name} must be of the form datasets:owner/name:split, or ")
