import ast
import random

import pytest

from areal_core.errors import ConfigError
from benchmarks import _programs as benchmark
from benchmarks._mutants import EQUIVALENT, mutants
from benchmarks.attacks import MARK, attacks
from tests.support.sandboxes import needs_sandbox

SOURCE = 'def f(x):\n    """1 + 1"""\n    if x < 2 and not x:\n        return x + 1.5\n    return True\n'
CHANGES = {
    "1:7 x < 2 -> x >= 2",
    "1:7 x < 2 -> x <= 2",
    "1:11 2 -> 3",
    "1:7 x < 2 and (not x) -> x < 2 or not x",
    "1:17 not x -> x",
    "2:15 x + 1.5 -> x - 1.5",
    "2:19 1.5 -> 2.5",
    "3:11 True -> False",
}


def test_mutants_are_all_changes_of_one_operator_behind_the_prompt():
    found = list(mutants(SOURCE, 3, random.Random(1)))
    assert {mutant.change for mutant in found} == CHANGES
    assert len(found) == len(CHANGES) == len({mutant.source for mutant in found})
    assert all(ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE)) for mutant in found)
    assert [mutant.change for mutant in mutants(SOURCE, 3, random.Random(1))] == [mutant.change for mutant in found]


def test_where_there_is_no_operator_a_text_or_the_result_is_changed():
    assert [m.change for m in mutants("def f(x):\n    return x.strip('a')\n", 2, random.Random(1))] == [
        "1:19 'a' -> 'ax'"
    ]
    assert [m.change for m in mutants("def f(x):\n    return x.strip()\n", 2, random.Random(1))] == [
        "1:4 return x.strip() -> return None"
    ]


def test_changes_that_are_called_equivalent_are_changes_of_own_problems():
    own = {problem["task_id"]: problem for problem in benchmark.problems(None)}
    for name, change in EQUIVALENT:
        if name in own:
            before = own[name]["prompt"]
            made = mutants(before + own[name]["canonical_solution"], before.count("\n") + 1, random.Random(0))
            assert change in [mutant.change for mutant in made]


@needs_sandbox
def test_only_what_the_tests_ask_for_tells_a_mutant():
    [problem] = [problem for problem in benchmark.problems(None) if problem["task_id"] == "own/2"]
    source = problem["prompt"] + problem["canonical_solution"]
    assert not benchmark.differs(problem, source.replace("number + 1", "number + 2"))
    assert benchmark.differs(problem, source.replace("== 0", "== 1"))
    assert benchmark.differs(problem, source.replace("return {d", "return [d").replace("0}", "0]"))


@needs_sandbox
@pytest.mark.attacks
def test_a_mutant_without_an_end_differs():
    [problem] = [problem for problem in benchmark.problems(None) if problem["task_id"] == "own/2"]
    assert benchmark.differs(problem, "def divisors(number):\n    while True: pass\n")


def test_data_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^--data: .*humaneval\.jsonl is not there$"):
        benchmark.problems(tmp_path)


def test_attacks_are_programs():
    every = attacks()
    assert len({attack.name for attack in every}) == len(every) >= 40
    for attack in every:
        assert attack.gain
        assert "@" not in attack.program
        if attack.name != "source too deep":
            compile(attack.program.replace("TCP", "1").replace("UDP", "2"), attack.name, "exec")
    assert MARK not in "".join(attack.program for attack in every)
