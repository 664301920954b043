"""Hostile answers to reasoning-gym: none gains anything, and none changes a later verdict."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.environments.fork_server import ForkServer, Reply
from tests.support.hostile_answers import hostile_answers, made

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: it needs a C compiler")

CHEAP = (  # those that evaluated answers, and some that read them in other ways
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion", "acre", "fraction_simplification", "graph_color",
    "game_of_life_halting", "leg_counting", "number_sorting", "rearc", "sudoku", "word_ladder",
)  # fmt: skip
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


def test_reasoning_gym_makes_every_data_set_but_one(entries: dict[str, dict[str, Any]]) -> None:
    assert {name for name, entry in entries.items() if "why" in entry} == NOT_MADE


@pytest.mark.parametrize("dataset", CHEAP)
def test_hostile_answers_are_contained(attacked: Attacked, entries: dict[str, dict[str, Any]], dataset: str) -> None:
    assert check(attacked, dataset, entries[dataset]) == (len(attacked.answers), True)


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
@pytest.mark.cpu_seconds(60)
def test_hostile_answers_to_every_data_set_are_contained(
    attacked: Attacked, entries: dict[str, dict[str, Any]]
) -> None:
    found = {name: check(attacked, name, entry) for name, entry in entries.items() if "why" not in entry}
    assert {name for name, kept in found.items() if kept != (len(attacked.answers), True)} == set()
