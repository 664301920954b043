"""Fields, templates and messages: what a row asks, and its gold answer as the verifier wants it."""

import math
from decimal import Decimal

import pytest

from areal_core.config.schema import TaskConfig
from areal_core.environments.row_schema import Schema
from areal_core.errors import ConfigError

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
    assert (nested.asked(row), nested.gold_answer(row)) == ("1 + 1", "2")
    said = "task.prompt_field=data.ask must be text, or messages of a chat that end on the user's, got nothing"
    for other in ({}, {"data": "1 + 1"}, {"data": {"asks": "1"}}):
        assert refused(nested.asked, other) == said


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "null"),
        (7, "a number"),
        (" \n", "empty text"),
        ({"a": 1}, "an object"),
        ([], "a list"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a list"),
        ([{"role": "tool", "content": "1"}], "a list"),
        ([*MESSAGES, {"role": "assistant", "content": "Because."}], "a list"),
    ],
)
def test_a_row_without_a_question_is_refused(content, got):
    assert refused(schema().asked, {"question": content}).endswith(f", got {got}")


def test_messages_keep_role_and_content():
    row = {"question": [MESSAGES[0], {**MESSAGES[1], "name": None}]}
    assert schema().asked(row) == tuple(MESSAGES)
    assert schema(prompt_template="{{ question[-1].content }}").worded(row, ()) == "Why?"


def test_a_template_words_the_fields_of_a_row():
    boxed = schema(prompt_template="{{ question }} ({{ of.subject | upper }})\nEnd on \\boxed{}.\n")
    row = {"question": "1 + 1?", "of": {"subject": "sums"}}
    assert boxed.worded(row, boxed.asked(row)) == "1 + 1? (SUMS)\nEnd on \\boxed{}.\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ question", ": must be a Jinja template: "),
        ("{{ questions }}", " fails: 'questions' is undefined"),
        ("{{ ''.__class__.mro() }}", " fails: access to attribute '__class__' of 'str' object is"),
        ("{% if 0 %}{{ question }}{% endif %} ", " must give a text, got none"),
    ],
)
def test_a_template_that_fails_is_one_line(template, said):
    found = refused(lambda: schema(prompt_template=template).worded({"question": "1 + 1?"}, "1 + 1?"))
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
        assert (made.worded(row, made.asked(row)), made.gold_answer(row)) == (text, answer)
    made = schema(held_out=True, **shared, **own)
    assert refused(made.asked, {"a": "1"}).startswith("task.held_out_prompt_field=c must be text")
    assert refused(made.worded, {"a": "1"}, "1").startswith("task.held_out_prompt_template fails")
    assert refused(made.gold_answer, {"b": "1"}).startswith("task.held_out_answer_field=d must be text or a number")


@pytest.mark.parametrize(
    ("content", "answer"),
    [("3 + 4 = 7\n#### 7", "7"), (-7, "-7"), (Decimal("2.50"), "2.50")],
)
def test_mathematics_wants_the_conclusion(content, answer):
    assert schema().gold_answer({"answer": content}) == answer


@pytest.mark.parametrize(
    ("verifier", "content", "said"),
    [
        ("mathematics", False, "must be text or a number, got false"),
        ("mathematics", math.inf, "must be text or a number, got Infinity"),
        ("mathematics", "", "must be text or a number, got empty text"),
        ("mathematics", "so\nnone", "must hold an answer, or end on one"),
        ("mathematics", "(1", "must hold an answer, or end on one"),
        ("code", [], "must hold a test"),
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
