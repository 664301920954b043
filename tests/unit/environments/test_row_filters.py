"""Duplicates, overlaps and success rates."""

import json
import re

import pytest

from areal_core.config.schema import TaskConfig
from areal_core.environments.dataset_report import LeftOut, Reason
from areal_core.environments.row_filters import SuccessRates, overlapping
from areal_core.errors import ConfigError

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


# -- success rates -----------------------------------------------------------------------------------------------------


def rates_file(folder, *rows):
    file = folder / "rates.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def reason(rates, row, *names):
    try:
        rates.check(row, names)
    except LeftOut as found:
        return found.reason, str(found)
    return None


def test_the_rate_of_a_row_is_bounded_at_both_ends():
    rates = SuccessRates(TaskConfig(success_field="of.rate", min_success=0.05, max_success=0.95))
    found = {rate: reason(rates, {"of": {"rate": rate}}) for rate in (0, 0.04, 0.05, 0.5, 0.95, 0.96, 1)}
    hard, easy = (Reason.TOO_HARD, ""), (Reason.TOO_EASY, "")
    assert found == {0: hard, 0.04: hard, 0.05: None, 0.5: None, 0.95: None, 0.96: easy, 1: easy}


@pytest.mark.parametrize("rate", [None, True, "0.5", -0.1, 1.1, 50, float("nan"), [0.5]])
def test_a_rate_is_a_number_from_0_to_1(rate):
    rates = SuccessRates(TaskConfig(success_field="rate"))
    assert reason(rates, {"rate": rate}) == (Reason.NO_RATE, "task.success_field=rate must be a number from 0 to 1")


def test_a_file_of_rates_names_prompts_by_id_or_by_text(tmp_path):
    rows = [{"prompt_id": "a1", "rate": 0.5}, {"prompt": "What is\nX?", "rate": 0, "tries": 8}]
    spellings = [{"prompt": "f(x)", "rate": 0}, {"prompt": "f(X)", "rate": 1}]
    file = rates_file(tmp_path, *rows, *spellings)
    rates = SuccessRates(TaskConfig(success_path=file, min_success=0.4, max_success=0.6))
    assert reason(rates, {}, "a1", "anything") is None
    assert reason(rates, {}, "a2", "what is x?") == (Reason.TOO_HARD, "")
    said = f"task.success_path: {file} has no rate of this prompt"
    assert reason(rates, {}, "a2", "What is y?") == (Reason.NO_RATE, said)
    assert [reason(rates, {}, name)[0] for name in ("f(x)", "f(X)")] == [Reason.TOO_HARD, Reason.TOO_EASY]


@pytest.mark.parametrize("line", ['{"rate": 0.5}', '{"prompt_id": 7, "rate": 0.5}', '{"prompt_id": "a", "rate": 5}'])
def test_a_bad_file_of_rates_is_named(tmp_path, line):
    file = rates_file(tmp_path, {"prompt_id": "a1", "rate": 0.5}, line)
    said = f"task.success_path: {file}, line 2: must hold prompt_id or prompt, text, and rate, a number from 0 to 1"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        SuccessRates(TaskConfig(success_path=file))
