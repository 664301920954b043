import dataclasses
import json
import math
import sys

import pytest

from areal_core.config.groups import EnvironmentConfig
from areal_core.environments import confined
from areal_core.environments.confined import decode, dumps, encode, loads
from areal_core.environments.environment import Verdict
from areal_core.environments.programs import Programs, read_tests, same_output, same_value
from areal_core.types import Outcome, Prompt
from benchmarks._programs import CASES, FORMS, Machine
from benchmarks.attacks import Attack, attacks
from tests.support.sandboxes import needs_sandbox

ATTACKS = attacks()
DEEP = "cached recursion"  # Python 3.12 limits it, whatever the stack
FAST = [case for case in CASES if len(case["answer"].get("inputs", ())) < 100]
FAST = [case for case in FAST if sys.version_info < (3, 12) or not case["case"].startswith(DEEP)]
SETTINGS = EnvironmentConfig(verifier="code", program_cpu_s=2, program_memory_mib=256)
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
PAIR = {
    "entry_point": "pair",
    "prompt": 'def twice(x):\n    return (x, x)\n\ndef pair(x):\n    """As twice."""\n',
    "test": "def check(candidate):\n    for x in (1, {2}, {'a': (b'b', 1e999)}, [None, True]):\n"
    "        assert candidate(x) == twice(x)\n",
}


def task(tests: object) -> Prompt:
    return Prompt(index=0, prompt_id="0", text="?", token_ids=(1,), answer=json.dumps(tests))


@pytest.fixture(scope="module")
def code():
    return Programs(SETTINGS)


RETURNED = "def pair(x):\n    return {}\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "completion", "outcome"),
    [
        (SUM, "print(sum(map(int, input().split())))\nexit(1)\n", Outcome.INCORRECT),
        (ADD, "def add(a, b):\n    print('beside the point')\n    return a + b\n", Outcome.CORRECT),
        (PAIR, RETURNED.format("twice(x)"), Outcome.CORRECT),
        (PAIR, "    return (x, x)\n", Outcome.CORRECT),
        (PAIR, RETURNED.format("[x, x]"), Outcome.INCORRECT),
        (PAIR, RETURNED.format("lambda: x"), Outcome.INCORRECT),
        (PAIR, "pass", Outcome.INCORRECT),
        ({**PAIR, "test": "1 / 0"}, RETURNED.format("(x, x)"), Outcome.FAILED),
        ({"inputs": []}, "print(1)", Outcome.FAILED),
    ],
)
def test_verdicts(code, tests, completion, outcome):
    assert code(task(tests), completion) == Verdict.of(outcome)


@needs_sandbox
@pytest.mark.parametrize("case", FAST, ids=[case["case"] for case in FAST])
def test_benchmarks_rules(code, case):
    assert code(task(case["answer"]), case["completion"]).outcome == case["expected"]


def empty(*outputs):
    """A task of so many tests without input."""
    return task({"inputs": [""] * len(outputs), "outputs": outputs})


@needs_sandbox
def test_a_verdict_has_one_budget_and_ends_with_the_first_wrong_test():
    half = "import time\nwhile time.process_time() < 0.6: pass\nprint(1)\n"
    code = Programs(dataclasses.replace(SETTINGS, program_cpu_s=1))
    assert code(empty("1"), half).outcome is Outcome.CORRECT
    assert code(empty("1", "1"), half).outcome is Outcome.TIMED_OUT
    assert code(empty(*["1"] * 60), "print(1)").outcome is Outcome.CORRECT  # sandboxes are not charged to the program
    began = []
    code._sandbox.run = lambda *arguments, run=code._sandbox.run: began.append(1) or run(*arguments)  # pyright: ignore
    assert code(empty("1", "2", "3"), "print(1)").outcome is Outcome.INCORRECT
    assert len(began) == 2


@needs_sandbox
@pytest.mark.parametrize("busy", [0, 1, 2])
def test_a_program_is_out_of_wall_time_in_two_sandboxes(busy):
    code = Programs(dataclasses.replace(SETTINGS, program_cpu_s=0.5))
    sources = ["import time; time.sleep(1000)"] * busy + ["print(1)"]
    code._sandbox.run = lambda source, *others, run=code._sandbox.run: run(sources.pop(0), *others)  # pyright: ignore
    assert code(empty("1"), "print(1)").outcome is (Outcome.TIMED_OUT if busy == 2 else Outcome.CORRECT)
    assert len(sources) == (busy == 2)


@needs_sandbox
def test_a_broken_sandbox_gives_no_result(monkeypatch, code):
    monkeypatch.setattr("areal_core.environments.bubblewrap._system", lambda: ("--ro-bind", "/nowhere", "/usr"))
    for tests in (SUM, ADD, PAIR):
        assert code(task(tests), "pass").outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "answer",
    [
        "{", "7", "{}", '{"test": 1}', '{"inputs": ["1"], "outputs": []}', '{"inputs": [1], "outputs": ["1"]}',
        '{"fn_name": "f", "inputs": ["1"], "outputs": [1]}', '{"inputs": [[1]], "outputs": [1]}',
    ],
)  # fmt: skip
def test_other_forms_are_refused(answer):
    with pytest.raises(ValueError, match=r"."):
        read_tests(answer)


SAME_OUTPUT = [
    ("3\n", "3"), ("1 2 \n3", "1 2\n3\n\n"), ("1\n2", "\n1\n2\n\n"), ("0.5", "0.50"), ("0.00001", "1e-05"),
    ("x 2.0", "x 2"), ("0.014286", "0.0142857142857"), ("1e5", "100000"), ("-0.0", "0.0"), ("", "\n"),
]  # fmt: skip
OTHER_OUTPUT = [
    ("1\n2", "1 2"), ("1\n\n2", "1\n2"), ("1000001", "1000000.9999999"), ("1000000.5", "1000000"),
    ("1e9999", "1e9998"), ("0.3333", "0.33333"), ("7", "007"), ("7.0", "07"), ("1000", "1_000"), ("nan", "NaN"),
    ("YES", "Yes"), ("9" * 50 + ".0", "9" * 49 + "8.0"),
]  # fmt: skip


def test_output_is_compared_by_lines_and_decimals_by_value():
    assert [case for case in SAME_OUTPUT if not same_output(*case)] == []
    assert [case for case in OTHER_OUTPUT if same_output(*case)] == []


SAME_VALUES = [
    ([1, [2.5, None]], (1, [2.5, None])), (3, 3.0), ({"a": [1]}, {"a": (1,)}), ({"1": 2}, {1: 2}), (0.3, 0.1 + 0.2),
    (math.nan, math.nan), ([], ()), (["list", []], ["list", []]),
]  # fmt: skip
OTHER_VALUES = [
    ("3", 3), ({"1": 2, "2": 1}, {1: 2, "1": 2}), ({"1": 2}, {(1,): 2}), (1000001.0, 1000000.0), (1.0, True),
    (math.inf, 1e308), ({"a": 1}, {"a": 1, "b": 2}), ([1, 2], {1, 2}), ([], {}), ([1], [1, 1]), (None, []),
    ([], "list"), ("a", b"a"),
]  # fmt: skip
FORGED = ["", "[", "[" * 100_000, '["list"]', '["dict", [1]]', '["dict", [[["list", []], 1]]]', "{}", "9" * 5000]


def test_values_are_compared_as_json_has_them():
    def same(expected, value):
        return same_value(expected, json.dumps(encode(value)))

    assert [case for case in SAME_VALUES if not same(*case)] == []
    assert [case for case in OTHER_VALUES if same(*case)] == []
    assert [text[:20] for text in FORGED if same_value([], text) or same_value({}, text)] == []


@pytest.mark.parametrize("module", confined._ON_DEMAND)
def test_names_that_a_program_is_given(monkeypatch, module):
    monkeypatch.setattr(sys, "setrecursionlimit", lambda limit: None)
    names = [module, *confined._ON_DEMAND[module].split()]
    assert confined.prepared(compile("\n".join(names), "", "exec")).keys() >= {*names, "inf", "heappush", "gcd"}
    assert confined.prepared(compile("x", "", "exec")).keys().isdisjoint(names)


def test_values_cross_as_they_are():
    values = [None, True, 2**70, 1.5, math.inf, "a\ud800\n", b"\0\xff", 1j, (1, [2, {3}]), {(1, 2): frozenset("ab")}]
    assert decode(loads(dumps(encode(values)))) == values
    assert json.loads(dumps(encode(values))) == json.loads(json.dumps(encode(values)))
    assert [type(value) for value in decode(encode(values))] == [type(value) for value in values]
    for text in ("", "[", "junk"):
        with pytest.raises(ValueError, match=r"."):
            loads(text)
    with pytest.raises(TypeError):
        encode([object()])
    for forged in (["os.system", []], {"a": 1}, ["list"], ["bytes", 1], ["set", [["list", []]]]):
        with pytest.raises((ValueError, TypeError)):
            decode(forged)


@pytest.fixture(scope="module")
def machine():
    with Machine() as machine:
        yield machine


@needs_sandbox
@pytest.mark.attacks
@pytest.mark.parametrize("place", range(len(ATTACKS)), ids=[attack.name for attack in ATTACKS])
def test_attacks_gain_nothing(machine, place):
    """In one form of tests each; the benchmark tries all."""
    assert machine.harm(ATTACKS[place], [FORMS[place % len(FORMS)]]) == []


@needs_sandbox
def test_attacks_would_be_seen(machine, monkeypatch):
    """Without isolation, those that are harmless enough to be let loose here; and a program that knows the secret."""
    known = {attack.name: attack for attack in ATTACKS}
    program = f"def answer(n): return {machine._secret!r}\nif __name__ == '__main__': print(answer(1))\n"
    assert machine.harm(Attack("the secret", "", program)) == [
        f"right as {form}" for form in ("check", "calls", "scripts")
    ]
    for sandbox in (machine._sandbox, machine._verify._sandbox):
        monkeypatch.setattr(sandbox, "_isolation", "none")
    for name in ("TCP", "UDP", "Unix socket", "abstract socket"):
        assert any("reached" in harm for harm in machine.harm(known[name])), name
    daemon = machine.harm(known["daemon that holds the pipes"])
    assert any("left a process" in harm for harm in daemon)
