"""Programs as answers: whether the one in a completion passes its task's tests.

    Programs(config)(task, completion) -> Verdict

`Prompt.answer` holds the tests, as JSON in one of three forms:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                 a script that reads and prints
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}     a function, or a method of a class Solution
    {"entry_point": "add", "prompt": "def add...", "test": "def check(candidate): ..."}    HumanEval's

What is expected never is where the program is. A script's output and a function's results are compared here, as text
and as JSON; HumanEval's `check` runs in a sandbox of its own, and its calls travel to the program's.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import textwrap
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from areal_core.config.schema import EnvironmentConfig
from areal_core.environments.confined import encode
from areal_core.environments.environment import Verdict
from areal_core.environments.sandbox import Limits, Result, Running, Sandbox, Status
from areal_core.types import Outcome, Prompt

logger = logging.getLogger(__name__)

_SPARE_BYTES = 2**20  # that a program may print or return beyond what is expected
_ANSWER = re.compile(r"(?<!['\"])<answer>(.*?)(</answer>|\Z)", re.DOTALL)
_BLOCK = re.compile(
    r"""(?:(^[ \t]*+(?:(?:[-*+>]|\d++[.)])[ \t]++)?)|(?<![`~'"]))  # a new line or list item, or behind other text
    (`{3,9}+|~{3,9}+)[ \t]*+([\w.{}+\#-]*+)  # fence, language
    ((?:[ \t]++(?:import|from|def|class|print)\b[^\n`]*+)?)  # a first line of code right behind it
    (?(1)[^\n`]*+|[ \t]*+)((?:\n.*?)?)(?:^[ \t]*+\2|(?<![`~'"])\2[ \t]*+$|\Z)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_PYTHON = re.compile(r"\{?\.?py(?:thon)?[\d.]*\}?", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_RELATIVE, _ABSOLUTE = Decimal("1e-5"), Decimal("1e-8")  # numpy.allclose's, which APPS compares by
_MOST, _FLOAT = Decimal("0.01"), Decimal("1e-15")  # the most that these may allow; and what a float's rounding does
_DECIMALS = 5  # from which on an expected number counts as rounded to what is written
_FOUND = {status: Outcome(status) for status in (Status.UNPARSABLE, Status.TIMED_OUT, Status.FAILED)}


class Scripts(msgspec.Struct, frozen=True, kw_only=True):
    """What a script reads, and what it is to print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a function, and what it is to return."""

    fn_name: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A program whose `check(candidate)` raises where the candidate is wrong."""

    entry_point: str
    prompt: str  # the beginning of the function, and what it may call
    test: str


class Programs:
    """The verifier `code`. Raises ConfigError where programs can't be run as environment.sandbox says."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._sandbox = Sandbox(
            config.sandbox, memory_mib=config.program_memory_mib, processes=config.program_processes
        )
        self._sandbox.check()

    def __call__(self, task: Prompt, completion: str) -> Verdict:
        """RIGHT for a program that passes all tests; TIMED_OUT for one that takes too much time, of the wall clock's in
        two sandboxes; WRONG also for one that takes too much of anything else. FAILED is what the machine is to blame
        for, and a task whose tests can't be read."""
        try:
            tests = read_tests(task.answer)
        except ValueError as error:
            logger.warning("prompt %s: its tests can't be read: %s", task.prompt_id, error)
            return Verdict.of(Outcome.FAILED)
        block = last_block(completion)
        source = completion if block is None else block
        judged_by = {Scripts: self._scripts, Calls: self._calls, Check: self._check}
        run: Callable[..., Outcome | None] = judged_by[type(tests)]
        readings = [source, textwrap.dedent(source), source.strip()]
        tries = (run(readings, tests) for _ in range(2))  # the wall time of one may be a busy machine's
        found = next((outcome for outcome in tries if outcome is not None), Outcome.TIMED_OUT)
        if found is Outcome.UNPARSABLE and block is None and not _BLOCK.search(completion):
            found = Outcome.NO_ANSWER  # prose; a block of another language is an answer
        return Verdict.of(found)

    def _scripts(self, sources: Sequence[str], tests: Scripts) -> Outcome | None:
        """One sandbox a test, one budget for all. None, here and below: it is out of wall time."""
        wall_s = cpu_s = 0.0
        source, *others = sources
        for given, expected in zip(tests.inputs, tests.outputs, strict=True):
            limits = self._limits(len(expected.encode(errors="replace")), cpu_s, wall_s)
            result = self._sandbox.run(source, given.encode(errors="replace"), limits, *others)
            if result.status is not Status.FINISHED:
                return _of(result)
            if not same_output(expected, result.stdout.decode(errors="replace")):
                return Outcome.INCORRECT
            wall_s, cpu_s = wall_s + result.wall_s, cpu_s + result.cpu_s
        return Outcome.CORRECT

    def _calls(self, sources: Sequence[str], tests: Calls) -> Outcome | None:
        job = {"kind": "serve", "sources": sources, "before": None, "entry": tests.fn_name}
        with self._sandbox.start(job, self._limits(max(len(json.dumps(value)) for value in tests.outputs))) as program:
            if (said := program.receive()) != "ready":
                return _ended(program, said)
            for arguments, expected in zip(tests.inputs, tests.outputs, strict=True):
                program.send("call " + json.dumps(encode((arguments, {}))))
                if not (said := program.receive() or "").startswith("value "):
                    return _ended(program, said)
                if not same_value(expected, said.removeprefix("value ")):
                    return Outcome.INCORRECT
        return Outcome.CORRECT

    def _check(self, sources: Sequence[str], tests: Check) -> Outcome | None:
        """The checker's calls go to the program, and the program's values to the checker, which alone reads them."""
        both = {"before": tests.prompt, "entry": tests.entry_point}
        readings = list(sources)
        whole = f"def {tests.entry_point}" in sources[0]  # or what follows the prompt
        readings.insert(len(sources) if whole else 1, tests.prompt + sources[0])
        asked = {**both, "kind": "serve", "sources": readings}
        limits = self._limits(0)
        with (
            self._sandbox.start(asked, limits) as program,
            self._sandbox.start({**both, "kind": "check", "test": tests.test}, limits) as checker,
        ):
            if checker.receive() != "ready":
                checker.finish()
                return Outcome.FAILED
            if (said := program.receive()) != "ready":
                return _ended(program, said)
            while (call := checker.receive() or "").startswith("call "):
                program.send(call)
                if not (said := program.receive() or "").startswith("value "):
                    return _ended(program, said)
                checker.send(said)
            if call == "passed":
                return Outcome.CORRECT
            return Outcome.INCORRECT if call == "failed" else _ended(checker, call)

    def _limits(self, expected_bytes: int, cpu_s: float = 0.0, wall_s: float = 0.0) -> Limits:
        """What is left of a program's time after these seconds."""
        return Limits(
            cpu_s=self._config.program_cpu_s - cpu_s,
            wall_s=self._config.program_wall_s - wall_s,
            output_bytes=2 * expected_bytes + _SPARE_BYTES,
        )


def _ended(running: Running, said: str | None) -> Outcome | None:
    """Of a program that says no more, or what it should not."""
    if said == "unparsable":
        return Outcome.UNPARSABLE
    return Outcome.INCORRECT if said else _of(running.finish())


def _of(result: Result) -> Outcome | None:
    return None if result.status is Status.OVERDUE else _FOUND.get(result.status, Outcome.INCORRECT)


def read_tests(answer: str) -> Scripts | Calls | Check:
    """The tests of a task. Raises ValueError for what has none of the three forms."""
    given = json.loads(answer, object_hook=_with_integer_keys)
    if not isinstance(given, dict):
        raise ValueError("no JSON object")
    kind = Check if "test" in given else Scripts if given.get("fn_name") is None else Calls
    tests = msgspec.convert(given, kind)
    if not isinstance(tests, Check) and not 0 < len(tests.inputs) == len(tests.outputs):
        raise ValueError("inputs and outputs must be lists of the same length, one test at least")
    return tests


def _with_integer_keys(table: dict[str, Any]) -> dict[Any, Any]:
    """As APPS reads a dictionary whose keys are all integers, which JSON can only write as text."""
    if all(re.fullmatch("0|-?[1-9][0-9]{0,18}", key) for key in table):
        return {int(key): value for key, value in table.items()}
    return table


def last_block(completion: str) -> str | None:
    """The last fenced block of Python; of an unnamed language where none is of Python. What stands in <answer> counts
    before anything else, and needs no fence. None: there is no such block."""
    answer, closed = [("", ""), *_ANSWER.findall(completion)][-1]
    bare = answer.strip() and not _BLOCK.search(answer)
    if bare and closed:
        return answer
    return _fenced(answer) or _fenced(completion) or (answer if bare else None)


def _fenced(text: str) -> str | None:
    blocks = [(tag, (line + rest).removeprefix("\n")) for _, _, tag, line, rest in _BLOCK.findall(text)]
    blocks = [(tag, block) for tag, block in blocks if block.strip()]
    named = [block for tag, block in blocks if _PYTHON.fullmatch(tag)]
    return (named or [block for tag, block in blocks if not tag] or [None])[-1]


def same_output(expected: str, found: str) -> bool:
    """Line by line and token by token, without blank lines at both ends: 0.50 is 0.5, and 007 is not 7."""
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in (expected, found))
    tokens = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=False)
    return [*map(len, ours)] == [*map(len, theirs)] and all(itertools.starmap(_same_token, tokens))


def _same_token(expected: str, found: str) -> bool:
    """Numbers by value where either is a decimal; near by, where the expected one is. Whole numbers are never near."""
    if expected == found:
        return True
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found) and re.search("[.eE]", expected + found)):
        return False
    ours, theirs = Decimal(expected), Decimal(found)
    whole = all(number == number.to_integral_value() for number in (ours, theirs))
    if whole or not re.search("[.eE]", expected):
        return ours == theirs
    allowed = max(min(_ABSOLUTE + _RELATIVE * abs(ours), _MOST), _FLOAT * abs(ours))
    decimals = len(expected.partition(".")[2])
    if decimals >= _DECIMALS and "e" not in expected.lower():
        allowed = max(allowed, Decimal(5).scaleb(-decimals - 1))
    return abs(ours - theirs) <= allowed


def same_value(expected: Any, encoded: str) -> bool:
    """Whether a value is what came back from a program (`confined.encode`), which is neither trusted nor made into
    Python's own collections, whose hashes it could choose. Tuples count as lists, keys by their text, since JSON has
    no others, and nan as nan. Sets are no lists, which have an order."""
    try:
        return _same(expected, json.loads(encoded))
    except (ValueError, RecursionError):
        return False


def _same(expected: Any, found: Any) -> bool:
    match expected, found:
        case list(), ["list" | "tuple", [*parts]]:
            return len(expected) == len(parts) and all(map(_same, expected, parts))
        case dict(), ["dict", [*pairs]]:
            ours = {_key(key): value for key, value in expected.items()}
            parts = {_key(pair[0]): pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2}
            return (
                len(pairs) == len(parts)
                and ours.keys() == parts.keys()
                and all(map(_same, ours.values(), map(parts.get, ours)))
            )
        case (list() | dict(), _) | (_, list() | dict()):
            return False
        case float(), int() | float():
            return _same_token(repr(expected), repr(found))
    return expected == found


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key)
