"""Unit tests of every published schema in the three forms that the verifier `code` takes."""

import base64
import json
import os
import pickle
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


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_human_eval():
    [form] = published("humaneval.jsonl", "test")
    assert form["entry_point"] == "twice"
    assert form["prompt"].startswith("def twice(")
    assert form["test"].startswith("def check(candidate):")


def test_apps():
    assert published("apps.jsonl", "input_output") == [
        {"inputs": ["1\n2\n", "7\n-7\n"], "outputs": ["2\n", "7\n"]},
        {"fn_name": "halve", "inputs": [[8], [3]], "outputs": [4, 1.5]},
    ]


def test_deepcoder():
    assert published("deepcoder.jsonl", "tests") == [
        {"inputs": ["4\n", "-3\n"], "outputs": ["16\n", "9\n"]},
        {"fn_name": "gap", "inputs": [[3, 8], [2, 2]], "outputs": [5, 0]},
        {"inputs": ["one two\nthree", "a b\n"], "outputs": ["two one", "b a\n"]},
        {"fn_name": "ends", "inputs": [["hut"], ["a"]], "outputs": ["ht", "aa"]},
        {"fn_name": "smallest", "inputs": [[[3, 1, 2], 2]], "outputs": [[1, 2]]},
    ]


def test_live_code_bench():
    assert published("livecodebench.jsonl", "private_test_cases") == [
        {"inputs": ["5\n", "8\n", "1\n"], "outputs": ["3\n", "4\n", "1\n"]},
        {"fn_name": "smallest", "inputs": [[[3, 1, 2], 2], [["b", "a"], 1]], "outputs": [[1, 2], ["a"]]},
    ]


def test_the_public_tests_alone():
    public = json.dumps([{"input": "5", "output": "3", "testtype": "stdin"}])
    assert json.loads(unit_tests(public, {"public_test_cases": public})) == {"inputs": ["5"], "outputs": ["3"]}


def test_tests_may_lie_in_a_field_as_they_are_and_have_no_type():
    """As Parquet has them, and as DeepCoder has those of Codeforces."""
    found = unit_tests([{"input": "1", "output": "2"}], {"metadata": "not JSON"})
    assert json.loads(found) == {"inputs": ["1"], "outputs": ["2"]}


def test_a_list_of_one_around_every_result_is_not_part_of_it():
    one, two = ({"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs} for outputs in ([[1], [2]], [[1], [2, 3]]))
    assert json.loads(unit_tests(one, {}))["outputs"] == [1, 2]
    assert json.loads(unit_tests(two, {}))["outputs"] == [[1], [2, 3]]


STDIN = {"input": "1", "output": "2", "testtype": "stdin"}
CALL = {"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "must hold tests in JSON, compressed or not: "),
        ("eJw=", "must hold tests in JSON, compressed or not: "),
        (packed("[")[:-4], "must hold tests in JSON, compressed or not: "),
        ("[" * 100_000, "must hold tests in JSON, compressed or not: maximum recursion depth"),
        (None, "must hold a list of tests, or an object of inputs and outputs"),
        ("7", "must hold a list of tests, or an object of inputs and outputs"),
        ({}, "must hold as many inputs as outputs, at least one"),
        ({"inputs": [], "outputs": []}, "must hold as many inputs as outputs, at least one"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "must hold as many inputs as outputs, at least one"),
        ({"inputs": [1], "outputs": ["1"]}, "must hold inputs and outputs that are text"),
        ({"inputs": [[1]], "outputs": ["1"]}, "must hold inputs and outputs that are text"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "must hold arguments as a list, or as text with one a line"),
        ({"fn_name": "f", "inputs": [[date(2024, 1, 1)]], "outputs": [1]}, "must hold tests that JSON can say: "),
        ([], "must hold a test"),
        (["1"], "must hold tests with an input and an output each"),
        ([{"input": "1"}], "must hold tests with an input and an output each"),
        (
            [STDIN, CALL],
            "must hold tests of one type, stdin, stdin_stdout, functional or function_call, got functional",
        ),
        ([STDIN | {"testtype": ["a"]}], "must hold tests of one type, "),
        ([CALL | {"metadata": None}], "must hold the name of the function that is tested, metadata.func_name or fn"),
        ([CALL | {"input": "one"}], "must hold arguments and results in JSON: "),
    ],
)
def test_what_are_no_tests_is_said_in_one_line(value, said):
    with pytest.raises(ConfigError) as caught:
        unit_tests(value, {})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("row", [{"entry_point": "f"}, {"entry_point": 1, "prompt": "def f():"}])
def test_human_eval_takes_three_fields(row):
    with pytest.raises(
        ConfigError, match="must hold tests of the function that the fields entry_point and prompt name"
    ):
        unit_tests("def check(f): ...", row)


def test_tests_in_json_may_stand_beside_an_entry_point():
    assert json.loads(unit_tests('{"inputs": ["1"], "outputs": ["2"]}', {"entry_point": "f"}))["inputs"] == ["1"]


class _Payload:
    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_pickle_of_anything_but_text_is_refused_and_does_nothing(tmp_path):
    payload = _Payload()
    payload.folder = tmp_path / "made"
    for value in (payload, b"[]", ["[]"], ("[]", "[]"), 7, {"a": payload}):
        with pytest.raises(ConfigError, match="must hold tests in JSON, compressed or not"):
            unit_tests(packed(value), {})
    assert not payload.folder.exists()


def test_tests_of_every_protocol_and_length_are_unpacked():
    for text in ("1", "\u00e9\u4e2d", "7" * 100_000):
        tests = json.dumps([{"input": text, "output": "1"}], ensure_ascii=False)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            value = base64.b64encode(zlib.compress(pickle.dumps(tests, protocol))).decode()
            assert json.loads(unit_tests(value, {}))["inputs"] == [text]


def test_a_text_that_inflates_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("areal_core.environments.unit_tests._MAX_BYTES", 1000)
    tests = json.dumps([{"input": "1" * 2000, "output": "1"}])
    with pytest.raises(ConfigError, match=r"must hold tests in JSON, .*; more than 1000 bytes"):
        unit_tests(packed(tests), {})
    assert unit_tests(packed(tests[:20] + tests[1990:]), {})
