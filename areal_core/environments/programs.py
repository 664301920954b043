"""Programs as answers: run the program in a completion against its task's tests.

    Programs(config)(task, completion) -> Verdict

`Prompt.answer` holds the tests, as JSON in one of three forms:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                 a script that reads and prints
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}     a function, or a method of a class Solution
    {"entry_point": "add", "prompt": "def add...", "test": "def check(candidate): ..."}    HumanEval's

The program's sandbox never contains the expected results. This module compares a script's output as text, and a
function's results as JSON. HumanEval's `check` runs in its own sandbox, and its calls are forwarded to the program's.
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

from areal_core.config.groups import EnvironmentConfig
from areal_core.environments.confined import encode
from areal_core.environments.environment import Verdict
from areal_core.environments.sandbox import Limits, Result, Running, Sandbox, Status
from areal_core.types import Outcome, Prompt

logger = logging.getLogger(__name__)

_SPARE_BYTES = 2**20  # bytes that a program may print or return beyond the expected size
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
_RELATIVE, _ABSOLUTE = Decimal("1e-5"), Decimal("1e-8")  # tolerances of numpy.allclose, with which APPS compares
_MOST, _FLOAT = Decimal("0.01"), Decimal("1e-15")  # largest absolute tolerance; relative rounding error of a float
_DECIMALS = 5  # with so many decimals, an expected number counts as rounded to its last digit
_FOUND = {status: Outcome(status) for status in (Status.UNPARSABLE, Status.TIMED_OUT, Status.FAILED)}


class Scripts(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs for a script, and the outputs that it must print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments for a function, and the results that it must return."""

    fn_name: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A program whose `check(candidate)` raises if the candidate is incorrect."""

    entry_point: str
    prompt: str  # beginning of the function, and helpers that it may call
    test: str


class Programs:
    """The verifier `code`. Raises ConfigError if environment.sandbox does not work on this machine."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._sandbox = Sandbox(
            config.sandbox, memory_mib=config.program_memory_mib, processes=config.program_processes
        )
        self._sandbox.check()

    def __call__(self, task: Prompt, completion: str) -> Verdict:
        """Judge the program in a completion.

        CORRECT: it passes all tests. TIMED_OUT: it exceeds its CPU time, or its wall time in two attempts. INCORRECT:
        it fails a test or exceeds another limit. UNPARSABLE: it does not compile. NO_ANSWER: the completion is prose.
        FAILED: the machine failed, or the task's tests are unreadable."""
        try:
            tests = read_tests(task.answer)
        except ValueError as error:
            logger.warning("prompt %s: can't read its tests: %s", task.prompt_id, error)
            return Verdict.of(Outcome.FAILED)
        block = last_block(completion)
        source = completion if block is None else block
        judged_by = {Scripts: self._scripts, Calls: self._calls, Check: self._check}
        run: Callable[..., Outcome | None] = judged_by[type(tests)]
        readings = [source, textwrap.dedent(source), source.strip()]
        tries = (run(readings, tests) for _ in range(2))  # a busy machine may exhaust one attempt's wall time
        found = next((outcome for outcome in tries if outcome is not None), Outcome.TIMED_OUT)
        if found is Outcome.UNPARSABLE and block is None and not _BLOCK.search(completion):
            found = Outcome.NO_ANSWER  # prose; a block in another language is an answer
        return Verdict.of(found)

    def _scripts(self, sources: Sequence[str], tests: Scripts) -> Outcome | None:
        """Run one sandbox for each test, with one time budget for all.
        None, here and below: wall time is exhausted."""
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
        """Forward the checker's calls to the program, and its values back.
        Only the checker evaluates the values."""
        both = {"before": tests.prompt, "entry": tests.entry_point}
        readings = list(sources)
        whole = f"def {tests.entry_point}" in sources[0]  # the sources define the function, or continue the prompt
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
        """Limits for the next run, after the given seconds of CPU and wall time."""
        return Limits(
            cpu_s=self._config.program_cpu_s - cpu_s,
            wall_s=self._config.program_wall_s - wall_s,
            output_bytes=2 * expected_bytes + _SPARE_BYTES,
        )


def _ended(running: Running, said: str | None) -> Outcome | None:
    """Outcome of a program that sent nothing more, or an invalid line; None if wall time is exhausted."""
    if said == "unparsable":
        return Outcome.UNPARSABLE
    return Outcome.INCORRECT if said else _of(running.finish())


def _of(result: Result) -> Outcome | None:
    return None if result.status is Status.OVERDUE else _FOUND.get(result.status, Outcome.INCORRECT)


def read_tests(answer: str) -> Scripts | Calls | Check:
    """Parse the tests of a task. Raises ValueError if they have none of the three forms."""
    given = json.loads(answer, object_hook=_with_integer_keys)
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")
    kind = Check if "test" in given else Scripts if given.get("fn_name") is None else Calls
    tests = msgspec.convert(given, kind)
    if not isinstance(tests, Check) and not 0 < len(tests.inputs) == len(tests.outputs):
        raise ValueError("inputs and outputs must be lists of the same length, with at least one test")
    return tests


def _with_integer_keys(table: dict[str, Any]) -> dict[Any, Any]:
    """Convert a dictionary's keys if all are integers, like APPS; JSON can only write them as text."""
    if all(re.fullmatch("0|-?[1-9][0-9]{0,18}", key) for key in table):
        return {int(key): value for key, value in table.items()}
    return table


def last_block(completion: str) -> str | None:
    """Extract the last fenced Python block; without one, the last block of an unnamed language.
    The content of <answer> comes first, and needs no fence. None: there is no such block."""
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
    """Compare outputs by line and token, without blank lines at both ends: 0.50 is 0.5, 007 is not 7."""
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in (expected, found))
    tokens = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=False)
    return [*map(len, ours)] == [*map(len, theirs)] and all(itertools.starmap(_same_token, tokens))


def _same_token(expected: str, found: str) -> bool:
    """Compare tokens.
    Decimals compare by value, with a tolerance if the expected one is a decimal; integers exactly."""
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
    """Whether a program's value, encoded by `confined.encode`, equals the expected one.

    The value is not trusted. It is never converted to Python collections, because a program could choose their hashes.
    Tuples count as lists and keys by their text, since JSON has no others; nan equals nan. A set never equals a
    list."""
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
