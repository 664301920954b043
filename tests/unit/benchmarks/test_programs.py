import ast
import random

from benchmarks._mutants import mutants

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
