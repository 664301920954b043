"""Tasks of reasoning-gym: prompts by seed and index, none of them held out, judged by their own rules."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.groups import TaskConfig
from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import is_held_out
from areal_core.environments.fork_server import ForkServer, Reply
from areal_core.environments.procedural import ProceduralSource, entry, procedural, reading
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Outcome, Prompt
from tests.support.chat import chat_folder
from tests.support.hostile_answers import hostile_answers, made

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: it needs a C compiler")

SHORT = "min_num_statements=2 max_num_statements=3"


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(chat_folder(tmp_path))


def source(tokenizer, seed=1, **settings):
    task = {"dataset": "needle_haystack", "dataset_options": SHORT, "held_out": 20, "max_prompt_tokens": 300}
    config = RunConfig(task=TaskConfig(name="reasoning_gym", **{**task, **settings}), seed=seed)
    return ProceduralSource(config, tokenizer)


def test_a_prompt_is_a_function_of_seed_and_index(tokenizer):
    one, again, other = source(tokenizer), source(tokenizer), source(tokenizer, seed=2)
    late = one.prompt(50)
    assert [again.prompt(i) for i in range(40)] == [one.prompt(i) for i in range(40)]
    assert again.prompt(50) == late
    assert len({one.prompt(i).text for i in range(40)} | {other.prompt(i).text for i in range(40)}) == 80
    assert tokenizer.decode(late.token_ids) == late.text


def test_held_out_prompts_are_distinct_reserved_and_the_same_for_every_seed(tokenizer):
    opened = source(tokenizer, max_prompt_tokens=130)
    held_out, trained = opened.held_out(), [opened.prompt(i) for i in range(40)]
    assert held_out == source(tokenizer, seed=2, max_prompt_tokens=130).held_out()
    assert [prompt.index for prompt in held_out] == list(range(20))
    assert len({prompt.text for prompt in held_out}) == 20
    assert all(is_held_out(prompt.text) for prompt in held_out)
    assert not any(is_held_out(prompt.text) for prompt in trained)
    assert max(len(prompt.token_ids) for prompt in (*held_out, *trained)) <= 130


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dataset": "needles"}, r"task\.dataset: must be a data set of reasoning-gym, got 'needles'"),
        ({"dataset_options": "statements=3"}, r"task\.dataset_options: needle_haystack does not accept 'statements=3'"),
        ({"dataset_options": "'"}, r"task\.dataset_options: must be name=value pairs, got"),
        ({"max_prompt_tokens": 10}, r"task\.held_out: .* with task\.max_prompt_tokens=10, got"),
        (
            {"dataset": "coin_flip", "dataset_options": "min_trials=3 max_trials=3"},
            r"task\.held_out: must be at most about \d, the distinct prompts that coin_flip has",
        ),
    ],
)
def test_bad_data_sets_and_options_are_refused(tokenizer, settings, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        source(tokenizer, **settings)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Let me see.\n  Anna.\n", "Anna."),
        ("It is <answer>Ben</answer>, no, <answer> Anna\n</answer> of course.", "Anna"),
        ("<answer>a <answer>b</answer>", "a <answer>b"),
        ("</answer>\n<answer>", "<answer>"),
        (" \n", None),
    ],
)
def test_reading_takes_tagged_text_or_last_line_as_it_stands(completion, answer):
    assert reading(completion) == answer
    assert reading("1 2\n3 4\n5 6\n", lines=2) == "3 4\n5 6"


def task_of(dataset, draw=0, seed=11):
    """A task of a data set with its default options, and its gold answer."""
    gold = entry(dataset, "", seed, draw)["answer"]
    told = {"answer": gold, "dataset": dataset, "options": "", "seed": seed, "draw": draw}
    return Prompt(index=0, prompt_id="", text="", token_ids=(), answer=json.dumps(told)), gold


@pytest.mark.parametrize(
    ("dataset", "draw"),
    [
        ("ab", 7),  # empty
        ("codeio", 17),  # in quotes that belong to it, as the next
        ("sentence_reordering", 0),
        ("emoji_mystery", 1),  # begins with a quote
        ("game_of_life_halting", 0),
        ("intermediate_integration", 6),  # SymPy left the integral of reasoning-gym's own gold answer unevaluated
        ("sudoku", 0),  # of several lines
        ("knight_swap", 0),  # another one under another hash seed, as the next two
        ("polynomial_multiplication", 0),
        ("word_ladder", 0),
    ],
)
def test_gold_answers_are_right_in_tags_and_as_last_lines(dataset, draw):
    task, gold = task_of(dataset, draw)
    assert procedural(task, f"I think so:\n<answer>\n{gold}\n</answer>").outcome is Outcome.CORRECT
    assert not gold or procedural(task, f"I think so:\n{gold}").outcome is Outcome.CORRECT
    assert procedural(task, "\n").outcome is Outcome.NO_ANSWER
    assert "Integral" not in gold


@pytest.mark.parametrize(
    "dataset", ["ab", "calendar_arithmetic", "circuit_logic", "cryptarithm", "maze", "prime_factorization", "tsumego"]
)
def test_answers_earn_what_the_rule_of_their_data_set_gives(dataset):
    import reasoning_gym

    rule, made = reasoning_gym.create_dataset(dataset, seed=11, size=1), entry(dataset, "", 11, 0)
    task, gold = task_of(dataset)
    for answer in (gold, f"{gold}0", f"{gold} {gold}", f"{gold}\n{gold}", gold[:-1], "17", f"maybe {gold}"):
        try:
            own = rule.score_answer(answer, made)
        except ValueError:
            own = 0.0
        assert procedural(task, f"<answer>{answer}</answer>").score == own, answer


WITHOUT_ANSWER = ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
RESTATED = ["Integral({integrand}, {variable})", "-(-Integral({integrand}))", "integrate({integrand}, {variable}) + C"]


@pytest.mark.parametrize(
    ("dataset", "answer", "scores"),
    [
        *((dataset, "None", (0.0, 0.01)) for dataset in WITHOUT_ANSWER),  # as their rules give to what they can't read
        *((f"{kind}_integration", answer, (0.0,)) for kind in ("simple", "intermediate") for answer in RESTATED),
        ("prime_factorization", "zzqq", Outcome.UNPARSABLE),  # a rule raises for this and the next three
        ("coin_flip", "1e999", Outcome.UNPARSABLE),
        ("game_of_life", "{{}}", Outcome.UNPARSABLE),
        ("game_of_life", '{{"a":1}}', Outcome.UNPARSABLE),
        ("countdown", "abs({gold})", (1.0,)),  # formulas are scored as without confinement
        ("countdown", "1*({gold})", Outcome.INCORRECT),
        ("puzzle24", "round({gold})", (1.0,)),
        ("simple_integration", "1*({gold}) + 3", (1.0,)),
    ],
)
def test_answers_without_meaning_earn_nothing_and_formulas_what_they_are_worth(dataset, answer, scores):
    task, gold = task_of(dataset)
    told = entry(dataset, "", 11, 0)["metadata"] if "_integration" in dataset else {}
    verdict = procedural(task, f"<answer>{answer.format(gold=gold, **told)}</answer>")
    assert verdict.outcome is scores if isinstance(scores, Outcome) else verdict.score in scores
    assert gold is None or dataset not in WITHOUT_ANSWER


@pytest.mark.slow
def test_entries_are_the_same_in_every_process():
    """Of data sets that order sets by hash, or draw from the module `random` (list_functions, entry 27)."""
    sets = ["isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "word_ladder"]
    entries = "repr([entry(name, '', 5, draw) for name in sets for draw in (0, 1, 27)])"
    code = f"from areal_core.environments.procedural import entry\nsets = {sets}\nprint({entries})"
    seeded = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=seeded)
    assert other.stdout == eval(entries, {"entry": entry, "sets": sets}) + "\n"


def test_a_data_set_that_takes_too_long_is_refused_by_name(monkeypatch):
    scorer = "areal_core.environments.procedural_scores:Entries"
    server = ForkServer(scorer, cpu_s=1.0, prepare_cpu_s=0.05, isolation="none")
    monkeypatch.setattr("areal_core.environments.procedural._entries", server)
    with pytest.raises(
        ConfigError, match=r"^task\.dataset: acre could not generate entry 3 \(.*\); choose another data set"
    ):
        entry("acre", "", 1, 3)
    server.close()


EVALUATING = (  # data sets whose own scores evaluate an answer as Python
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip


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


NOT_MADE = {"composite"}  # it needs the names of others


class Attacked:
    """A server, and what attacks on it must not reach."""

    def __init__(self, folder: Path, scorer: str) -> None:
        secret, self.mark = folder / "secret", folder / "mark"
        secret.write_text("secret")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.server = ForkServer(scorer, cpu_s=0.3)
        self.answers = hostile_answers(self.mark, secret, self.listener.getsockname()[1])

    def judged(self, task: Any, answer: str) -> Reply:
        """By a new fork: no reply that is kept."""
        self.server._known.cache_clear()
        return self.server.ask(task, answer)

    def contained(self, task: Any, answer: str) -> bool:
        before = self.server.process
        reply = self.judged(task, answer)
        with pytest.raises(BlockingIOError):
            self.listener.accept()
        assert not self.mark.exists()
        assert self.server.process is before
        return reply.value is None or (isinstance(reply.value, float) and 0.0 <= reply.value < 1.0)

    def close(self) -> None:
        self.server.close()
        self.listener.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    scorer = "areal_core.environments.procedural_scores:Scores"
    opened = Attacked(tmp_path_factory.mktemp("attacked"), scorer)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, Any]]:
    return made()


def check(attacked: Attacked, dataset: str, entry: dict[str, Any]) -> tuple[int, bool]:
    """How many attacks on a data set are contained, and whether its right answer has the same score after them."""
    task = {"dataset": dataset, "options": "", "seed": 7, "draw": 0, "answer": entry["answer"]}
    before = attacked.judged(task, str(entry["answer"]))
    assert before.status == "done"
    contained = sum(attacked.contained(task, answer) for answer in attacked.answers.values())
    return contained, attacked.judged(task, str(entry["answer"])) == before


@pytest.mark.slow
def test_reasoning_gym_makes_every_data_set_but_one(entries: dict[str, dict[str, Any]]) -> None:
    assert {name for name, entry in entries.items() if "why" in entry} == NOT_MADE


def test_hostile_answers_that_are_executed_change_no_later_verdict(tmp_path: Path) -> None:
    attacked = Attacked(tmp_path, "tests.support.scorers:Evaluating")
    tasks = itertools.count()
    assert attacked.judged(next(tasks), "1") == Reply("done", 1)
    for name, answer in attacked.answers.items():
        attacked.contained(next(tasks), answer)
        assert attacked.judged(next(tasks), "gold") == Reply("done", "4"), name
        assert attacked.judged(next(tasks), "2 + 2") == Reply("done", 4), name
    attacked.close()


@pytest.mark.attacks
def test_hostile_answers_to_every_data_set_are_contained(
    attacked: Attacked, entries: dict[str, dict[str, Any]]
) -> None:
    found = {name: check(attacked, name, entry) for name, entry in entries.items() if "why" not in entry}
    assert {name for name, kept in found.items() if kept != (len(attacked.answers), True)} == set()
