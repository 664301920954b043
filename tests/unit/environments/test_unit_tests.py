"""Unit tests of every published schema in the three forms that the verifier `code` takes."""

import base64
import json
import os
import pickle
import struct
import tracemalloc
import zlib
from datetime import date
from pathlib import Path

import pytest

from areal_core.environments.unit_tests import unit_tests
from areal_core.errors import ConfigError

PUBLISHED = Path(__file__).parents[2] / "data" / "published"


def published(name, field):
    rows = [json.loads(line) for line in (PUBLISHED / name).read_text().splitlines()]
    return [json.loads(unit_tests(row[field], row)) for row in rows]


def packed(value, protocol=None):
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


FORMS = [json.loads(line) for line in (PUBLISHED / "forms.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", FORMS, ids=[case["name"] for case in FORMS])
def test_published_tests_are_read(case):
    assert published(case["name"], case["field"]) == case["forms"]


PUBLIC = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
CALLS = {"fn_name": "f", "inputs": [[1], [2]]}


@pytest.mark.parametrize(
    ("value", "row", "form"),
    [
        (PUBLIC, {"public_test_cases": PUBLIC}, {"inputs": ["1"], "outputs": ["2"]}),
        # As Parquet has them, and as DeepCoder has those of Codeforces.
        ([{"input": "1", "output": "2"}], {"metadata": "not JSON"}, {"inputs": ["1"], "outputs": ["2"]}),
        # A list of one around every result is no part of it.
        (CALLS | {"outputs": [[1], [2]]}, {}, CALLS | {"outputs": [1, 2]}),
        (CALLS | {"outputs": [[1], [2, 3]]}, {}, CALLS | {"outputs": [[1], [2, 3]]}),
    ],
)
def test_other_spellings_are_read(value, row, form):
    assert json.loads(unit_tests(value, row)) == form


STDIN = {"input": "1", "output": "2", "testtype": "stdin"}
CALL = {"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}
JSON = "must hold tests as JSON text, or as base64 of it, pickled and compressed with zlib; read as JSON: "
COUNT = "must hold as many inputs as outputs, at least one"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", JSON),
        (packed("[")[:-4], JSON),
        ("[" * 100_000, f"{JSON}maximum recursion depth"),
        (None, "must hold a list of tests, or an object with inputs and outputs"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, COUNT),
        ({"inputs": [[1]], "outputs": ["1"]}, "must hold inputs and outputs that are text"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "must hold the arguments of a test as a list"),
        ({"fn_name": "f", "inputs": [[date(2024, 1, 1)]], "outputs": [1]}, "must hold tests that JSON can represent: "),
        ([], "must hold at least one test"),
        (["1"], "must hold tests with an input and an output each"),
        (
            [STDIN, CALL],
            "must hold tests of one type, either stdin (stdin_stdout) or functional (function_call), got functional",
        ),
        ([STDIN | {"testtype": ["a"]}], "must hold tests of one type, "),
        ([CALL | {"metadata": None}], "must name the tested function: fn_name or metadata.func_name"),
        ([CALL | {"input": "one"}], "must hold arguments and results in JSON: "),
    ],
)
def test_bad_tests_are_refused_in_one_line(value, said):
    with pytest.raises(ConfigError) as caught:
        unit_tests(value, {})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_human_eval_takes_three_fields():
    [form] = published("humaneval.jsonl", "test")
    assert (form["entry_point"], form["test"][:21]) == ("twice", "def check(candidate):")
    for row in ({"entry_point": "f"}, {"entry_point": 1, "prompt": "def f():"}):
        with pytest.raises(ConfigError, match="must also have text in the fields entry_point "):
            unit_tests("def check(f): ...", row)
    assert json.loads(unit_tests('{"inputs": ["1"], "outputs": ["2"]}', {"entry_point": "f"}))["inputs"] == ["1"]


class _Payload:
    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_pickle_of_anything_but_text_is_refused_and_does_nothing(tmp_path):
    payload = _Payload()
    payload.folder = tmp_path / "made"
    for value in (payload, b"[]", ["[]"], ("[]", "[]"), 7, {"a": payload}):
        with pytest.raises(ConfigError, match="must hold tests as JSON text, or as base64 of it"):
            unit_tests(packed(value), {})
    assert not payload.folder.exists()


def test_every_protocol_of_pickle_is_unpacked():
    tests = json.dumps([{"input": "\u00e9\u4e2d" * 500, "output": "1"}], ensure_ascii=False)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert json.loads(unit_tests(packed(tests, protocol), {}))["inputs"] == ["\u00e9\u4e2d" * 500]


def test_a_pickle_takes_no_more_memory_than_its_text():
    text = json.dumps([{"input": "1", "output": "1"}]).encode()
    bomb = b"X" + struct.pack("<I", len(text)) + text + b"r" + struct.pack("<I", 2**21) + b"."
    tracemalloc.start()
    unit_tests(base64.b64encode(zlib.compress(bomb)).decode(), {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_a_text_that_inflates_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("areal_core.environments.unit_tests._MAX_BYTES", 1000)
    tests = json.dumps([{"input": "1" * 2000, "output": "1"}])
    with pytest.raises(ConfigError, match=r"must hold tests as JSON text, .*; read as base64: more than 1000 bytes"):
        unit_tests(packed(tests), {})
    assert unit_tests(packed(tests[:20] + tests[1990:]), {})
