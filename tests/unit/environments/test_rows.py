"""Files of every format, whole and broken, as numbered rows."""

import codecs
import json
import math
from datetime import datetime
from decimal import Decimal
from enum import IntEnum

import msgspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from areal_core.config.groups import TaskConfig
from areal_core.environments.rows import Row, Schema, plain, read_rows
from areal_core.errors import ConfigError

ROWS = [{"question": "a", "extra": {"answer": 1}}, {"question": "b", "extra": {"answer": 2}}]


def read(path):
    return list(read_rows("task.path", str(path)))


def write(folder, kind):
    """ROWS as a file of this kind."""
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=1)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    unit = "line" if kind == "jsonl" else "row"
    file, rows = write(tmp_path, kind), [Row(f"{unit} {number}", row) for number, row in enumerate(ROWS, 1)]
    assert read(file) == rows
    if kind != "parquet":
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
        assert read(file) == rows


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(b'\n{"a": 1}\r\n   \n{"a": "\xe2\x80\xa8"}')  # a line separator of Unicode ends no row
    assert read(file) == [Row("line 2", {"a": 1}), Row("line 4", {"a": "\u2028"})]


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
    assert bad.error.startswith(wrong)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"data": []}', "{file} must hold a list of JSON objects"),
        (b'{"a": 1}\n{"a": 2}\n', "{file} must be JSON, or be named .jsonl if it holds one object per line: "),
        (b'["\xff"]', "can't read {file}: 'utf-8' codec can't decode"),
    ],
)
def test_a_json_file_is_a_list_of_objects(tmp_path, content, said):
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1}, 2]')
    assert read(file) == [Row("row 1", {"a": 1}), Row("row 2", error="must be a JSON object")]
    file.write_bytes(content)
    assert refused(read, file).startswith(f"task.path: {said.format(file=file)}")


def test_a_file_that_is_absent_or_broken_is_named(tmp_path):
    for name in ("absent.jsonl", "absent.json", "absent.parquet"):
        assert refused(read, tmp_path / name).startswith(f"task.path: can't read {tmp_path}/{name}: ")
    file = write(tmp_path, "parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert refused(read, file).startswith(f"task.path: can't read {file}: Parquet magic bytes not found")
    file.write_bytes(whole[:4] + b"\xff" * 56 + whole[60:])  # in the first rows
    assert refused(read, file).startswith(f"task.path: can't read {file}: ")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def schema(verifier="mathematics", *, held_out=False, **settings):
    return Schema.of(TaskConfig(**settings), verifier, held_out=held_out)


def refused(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_field_may_lie_in_others():
    nested = schema(prompt_field="data.ask", answer_field="reward_model.ground_truth")
    row = {"data": {"ask": "1 + 1"}, "reward_model": {"ground_truth": "2"}}
    assert (nested.prompt_content(row), nested.gold_answer(row)) == ("1 + 1", "2")
    said = "task.prompt_field=data.ask must be text, or messages of a chat that end with the user's, got nothing"
    for other in ({}, {"data": "1 + 1"}, {"data": {"asks": "1"}}):
        assert refused(nested.prompt_content, other) == said


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "None"),
        (7, "7"),
        (" \n", "' \\n'"),
        ({"a": 1}, "{'a': 1}"),
        ([], "[]"),
        ([{"role": "user", "content": [{"type": "image"}]}], "[{'role': 'user', 'content': [{'type': 'image'}]}]"),
        ([{"role": "tool", "content": "1"}], "[{'role': 'tool', 'content': '1'}]"),
        ([*MESSAGES, {"role": "assistant", "content": "Because."}], f"{MESSAGES!r:.60}"),
    ],
)
def test_a_row_without_a_question_is_refused(content, got):
    assert refused(schema().prompt_content, {"question": content}).endswith(f", got {got}")


def test_messages_keep_role_and_content():
    row = {"question": [MESSAGES[0], {**MESSAGES[1], "name": None}]}
    assert schema().prompt_content(row) == tuple(MESSAGES)
    assert schema(prompt_template="{{ question[-1].content }}").render_prompt(row, ()) == "Why?"


def test_a_template_words_the_fields_of_a_row():
    boxed = schema(prompt_template="{{ question }} ({{ of.subject | upper }})\nEnd on \\boxed{}.\n")
    row = {"question": "1 + 1?", "of": {"subject": "sums"}}
    assert boxed.render_prompt(row, boxed.prompt_content(row)) == "1 + 1? (SUMS)\nEnd on \\boxed{}.\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ question", ": must be a Jinja template: "),
        ("{{ questions }}", " fails: 'questions' is undefined"),
        ("{{ ''.__class__.mro() }}", " fails: access to attribute '__class__' of 'str' object is"),
        ("{% if 0 %}{{ question }}{% endif %} ", " must render a text, got none"),
    ],
)
def test_a_template_that_fails_is_one_line(template, said):
    found = refused(lambda: schema(prompt_template=template).render_prompt({"question": "1 + 1?"}, "1 + 1?"))
    assert found.startswith(f"task.prompt_template{said}")


def test_the_held_out_file_may_have_fields_of_its_own():
    row = {"a": "1", "b": "2", "c": "3", "d": "4"}
    shared = {"prompt_field": "a", "answer_field": "b", "prompt_template": "{{ a }}!"}
    own = {"held_out_prompt_field": "c", "held_out_answer_field": "d", "held_out_prompt_template": "{{ c }}?"}
    for made, text, answer in (
        (schema(held_out=True, **shared), "1!", "2"),
        (schema(held_out=True, **shared, **own), "3?", "4"),
        (schema(**shared, **own), "1!", "2"),
    ):
        assert (made.render_prompt(row, made.prompt_content(row)), made.gold_answer(row)) == (text, answer)
    made = schema(held_out=True, **shared, **own)
    assert refused(made.prompt_content, {"a": "1"}).startswith("task.held_out_prompt_field=c must be text")
    assert refused(made.render_prompt, {"a": "1"}, "1").startswith("task.held_out_prompt_template fails")
    assert refused(made.gold_answer, {"b": "1"}).startswith("task.held_out_answer_field=d must be text or a number")


@pytest.mark.parametrize(
    ("content", "answer"),
    [("3 + 4 = 7\n#### 7", "7"), (-7, "-7"), (Decimal("2.50"), "2.50")],
)
def test_mathematics_wants_the_conclusion(content, answer):
    assert schema().gold_answer({"answer": content}) == answer


FINAL = r"must be a final answer, or a solution that ends with one (\boxed{7} or #### 7)"


@pytest.mark.parametrize(
    ("verifier", "content", "said"),
    [
        ("mathematics", False, "must be text or a number, got False"),
        ("mathematics", math.inf, "must be text or a number, got inf"),
        ("mathematics", "", "must be text or a number, got ''"),
        ("mathematics", "so\nnone", f"{FINAL}, got 'so\\nnone'"),
        ("mathematics", "(1", f"{FINAL}, got '(1'"),
        ("code", [], "must hold at least one test"),
    ],
)
def test_a_row_without_an_answer_is_refused(verifier, content, said):
    assert refused(schema(verifier).gold_answer, {"answer": content}) == f"task.answer_field=answer {said}"


@pytest.mark.parametrize("verifier", ["exact_match", "package.module:mine"])
def test_other_verifiers_want_the_field_as_it_stands(verifier):
    own = schema(verifier)
    given = [own.gold_answer({"answer": content}) for content in (" so\nnone ", 7, ["a", 1], {"b": None})]
    assert given == [" so\nnone ", "7", '["a", 1]', '{"b": null}']
    assert refused(own.gold_answer, {}) == "task.answer_field=answer must be text or a number, got nothing"


class Level(IntEnum):
    LOW = 1


def test_a_plain_row_has_values_that_every_machine_reads():
    odd = {
        1: Level.LOW,
        "time": datetime(2026, 1, 2),
        "bytes": b"a",
        "number": np.float64(1.5),
        "decimal": Decimal("1.50"),
    }
    said = plain(odd | {"bounds": [2**64 - 1, -(2**63), 2**64], "text": "\ud800\u00e9", "flag": np.bool_(True)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said)) == {
        "1": 1,
        "time": "2026-01-02 00:00:00",
        "bytes": "b'a'",
        "number": 1.5,
        "decimal": "1.50",
        "bounds": [2**64 - 1, -(2**63), str(2**64)],
        "text": "?\u00e9",
        "flag": "True",
    }
