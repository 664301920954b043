"""Tasks of reasoning-gym: prompts by seed and index, none of them held out, judged by their own rules."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.config.schema import TaskConfig
from areal_core.environments.fork_server import ForkServer, Reply
from areal_core.environments.held_out import is_held_out
from areal_core.environments.procedural import ProceduralSource, procedural, reading
from areal_core.errors import ConfigError
from areal_core.launch.supervisor import CHILD_ENV
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Outcome, Prompt
from tests.support.chat import chat_folder

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: it needs a C compiler")

SHORT = "min_num_statements=2 max_num_statements=3"


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(chat_folder(tmp_path))


def source(tokenizer, seed=1, **settings):
    task = {"dataset": "needle_haystack", "dataset_options": SHORT, "held_out": 20, "max_prompt_tokens": 300}
    return ProceduralSource(TaskConfig(name="reasoning_gym", **{**task, **settings}), tokenizer, seed=seed)


def test_a_prompt_is_a_function_of_seed_and_index(tokenizer):
    one, again, other = source(tokenizer), source(tokenizer), source(tokenizer, seed=2)
    late = one.prompt(50)
    assert [again.prompt(i) for i in range(40)] == [one.prompt(i) for i in range(40)]
    assert again.prompt(50) == late
    assert len({one.prompt(i).text for i in range(40)} | {other.prompt(i).text for i in range(40)}) == 80
    assert tokenizer.decode(late.token_ids) == late.text


def test_held_out_prompts_are_distinct_reserved_and_the_same_for_every_seed(tokenizer):
    held_out = source(tokenizer).held_out()
    assert held_out == source(tokenizer, seed=2).held_out()
    texts = {prompt.text for prompt in held_out}
    assert len(texts) == 20
    assert all(map(is_held_out, texts))
    assert not any(is_held_out(source(tokenizer).prompt(i).text) for i in range(40))
    assert [prompt.index for prompt in held_out] == list(range(20))


def test_prompts_are_no_longer_than_there_is_room_for(tokenizer):
    short = source(tokenizer, max_prompt_tokens=130)
    assert max(len(short.prompt(i).token_ids) for i in range(40)) <= 130
    assert max(len(prompt.token_ids) for prompt in short.held_out()) <= 130


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dataset": "needles"}, r"task\.dataset: must be a data set of reasoning-gym, got 'needles'"),
        ({"dataset_options": "statements=3"}, r"task\.dataset_options: needle_haystack does not take 'statements=3'"),
        ({"dataset_options": "min_num_statements=0"}, r"task\.dataset_options: .*min_num_statements must be greater"),
        ({"dataset_options": "'"}, r"task\.dataset_options: must be name=value pairs, got"),
        ({"max_prompt_tokens": 10}, r"task\.held_out: .* at most task\.max_prompt_tokens=10 tokens"),
        (
            {"dataset": "coin_flip", "dataset_options": "min_trials=3 max_trials=3"},
            r"task\.held_out: coin_flip has about \d distinct prompts",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(tokenizer, settings, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        source(tokenizer, **settings)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Anna", "Anna"),
        (' "Anna." ', "Anna"),
        ("Let me see.\nAnna.", "Anna"),
        ("It is <answer>Ben</answer>, no, <answer> Anna\n</answer> of course.", "Anna"),
        ("<answer>1 2\n3 4</answer>", "1 2\n3 4"),
        ("3.14", "3.14"),
        ("", ""),
        ("<answer></answer>", ""),
    ],
)
def test_the_answer_is_what_is_tagged_or_else_the_last_line(completion, answer):
    assert reading(completion) == answer


def test_answers_are_judged_by_the_rule_of_their_data_set(tokenizer):
    task = source(tokenizer).prompt(3)
    gold = json.loads(task.answer)["answer"]
    right = procedural(task, f"{gold.lower()}.")  # this one forgives case
    assert (right.outcome, right.score) == (Outcome.RIGHT, 1.0)
    padded = procedural(task, f"{gold} {'x' * (3 * len(gold) - 1)}")
    assert (padded.outcome, padded.score) == (Outcome.WRONG, 0.25)
    wrong = procedural(task, "Nobody")
    assert (wrong.outcome, wrong.score) == (Outcome.WRONG, 0.0)
    assert procedural(task, "\n").outcome is Outcome.NO_ANSWER


def test_a_rule_that_needs_more_than_the_answer_has_it(tokenizer):
    """Countdown: any expression that has the value counts, and the rule knows which numbers may be used."""
    countdown = source(tokenizer, dataset="countdown", dataset_options="max_numbers=4", max_prompt_tokens=4000)
    task = countdown.prompt(0)
    gold = json.loads(task.answer)["answer"]
    assert procedural(task, f"<answer>({gold}) + 0 * 0</answer>").outcome is Outcome.WRONG  # 0 isn't there to be used
    assert procedural(task, f"<answer>({gold})</answer>").outcome is Outcome.RIGHT


def test_the_verifier_needs_no_more_than_the_prompt(tokenizer):
    task = source(tokenizer).prompt(5)
    copy = Prompt(index=0, prompt_id="", text="", token_ids=(), answer=task.answer)
    assert procedural(copy, json.loads(task.answer)["answer"]).outcome is Outcome.RIGHT


EVALUATING = (  # data sets whose own scores evaluate an answer as Python
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip


@pytest.fixture(scope="module")
def scores():
    server = ForkServer("areal_core.environments.procedural_scores:Scores", cpu_s=1.0)
    yield server
    server.close()


def made_in_its_own_process(dataset):
    """A task, by the hash seed that processes of a run have: polynomial_multiplication depends on it."""
    entry = "from areal_core.environments.procedural_scores import entry"
    code = f"{entry}; print(repr(entry({dataset!r}, '', 5, 0)['answer']))"
    environment = os.environ | CHILD_ENV
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    answer = ast.literal_eval(said.stdout.splitlines()[-1])
    return {"dataset": dataset, "options": "", "seed": 5, "draw": 0, "answer": answer}


@pytest.mark.parametrize("dataset", EVALUATING)
def test_answers_are_never_executed(scores, tmp_path, dataset):
    mark = tmp_path / "executed"
    made = made_in_its_own_process(dataset)
    forged = "__import__('os').write(6, b'[\"done\", 1.0]') + __import__('os')._exit(0)"
    spelled = "parse_expr(sstr(chr))(57)"  # by SymPy's names, Python's own functions would be in reach
    for answer in (
        f"__import__('os').system('touch {mark}')",
        f"open('{mark}', 'w')",
        forged,
        spelled,
        "9**9**9**9",
        "exit()",
    ):
        assert scores.ask(made, answer).value in (None, 0.0, 0.01), answer
    assert scores.ask(made, str(made["answer"])) == Reply("done", 1.0)
    assert not mark.exists()


def test_no_other_scorer_evaluates_answers():
    """A new version of reasoning-gym may have others: the modules that call eval, exec or SymPy's parser."""
    import reasoning_gym

    found = set()
    for module in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        text = module.read_text()
        scoring = text[text.find("def score_answer") :] if "def score_answer" in text else ""
        if re.search(r"\b(eval|exec|parse_expr|literal_eval|sympify|parse_latex|yaml\.load|pickle)\(", scoring):
            found.add(module.stem)
    assert found == {*EVALUATING, "number_sorting"}  # the last evaluates the gold answer alone
