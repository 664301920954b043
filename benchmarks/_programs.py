"""Part of `benchmarks.verifiers`: the verifier for programs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import json
import os
import random
import resource
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from areal_core.config.groups import EnvironmentConfig
from areal_core.environments.programs import Programs
from areal_core.environments.sandbox import Limits, Sandbox, Status
from areal_core.errors import ConfigError
from areal_core.rewards.pool import RewardPool
from areal_core.types import Outcome, Prompt
from benchmarks._harness import tell
from benchmarks._mutants import EQUIVALENT, mutants
from benchmarks.attacks import BREACH, MARK, SECRET, Attack, attacks

CASES: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("code_cases.jsonl").read_text(encoding="utf-8").splitlines()
]
OWN = Path(__file__).with_name("problems.jsonl")
FILE = "humaneval.jsonl"
WORKERS = 2
ATTACKED = EnvironmentConfig(verifier="code", program_cpu_s=0.5, program_memory_mib=256, program_processes=8)
FORMS = ("check", "calls", "scripts")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: whoever loses its parent below this process becomes its child
_PLACES = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev",
    "/dev/shm",
    "/usr",
    "/etc",
    "/home",
    "/run",
    "~",
    ".",
    os.path.dirname(os.__file__),
)

Problem = Mapping[str, str]


def measure_programs(data: Path | None, seed: int) -> dict[str, Any]:
    found = problems(data)
    verify = Programs(EnvironmentConfig(verifier="code"))
    before = _cpu_s()
    passed = [problem["task_id"] for problem in found if judged(verify, problem, problem["canonical_solution"])]
    per_cpu_s = len(found) / (_cpu_s() - before)
    for problem in found:
        if problem["task_id"] not in passed:
            tell(f"{problem['task_id']}: the reference solution fails its tests")
    return {
        "human_eval_pass": len(passed),
        "human_eval_problems": len(found),
        "programs_per_cpu_s": round(per_cpu_s, 1),
        **code_cases(verify),
        **mutants_pass(found, seed),
        **attacks_contained(),
        "code_per_s": round(asyncio.run(_per_s(found)), 1),
    }


def _cpu_s() -> float:
    """CPU seconds of this process and of the sandboxes that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def code_cases(verify: Programs) -> dict[str, int]:
    """Verdicts on correct answers in every form that a benchmark allows, and on incorrect ones."""
    correct = accepted = 0
    for case in CASES:
        found = verify(_task(case["answer"], case["case"]), case["completion"]).outcome
        correct += found == case["expected"]
        accepted += found is Outcome.CORRECT and case["expected"] != Outcome.CORRECT
        if found != case["expected"]:
            tell(f"code case {case['case']!r}: got {found}, expected {case['expected']}")
    return {"code_cases_correct": correct, "code_cases": len(CASES), "code_cases_false_accept": accepted}


def problems(data: Path | None) -> list[Problem]:
    """Problems of HumanEval from the folder `data`; those of this package if it is None. Raises ConfigError."""
    path = OWN if data is None else data / FILE
    if not path.is_file():
        raise ConfigError(f"--data: must be a folder with the file {path.name}, got {path.parent}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(verify: Programs, problem: Problem, program: str) -> bool:
    return verify(_prompt(problem), program).outcome is Outcome.CORRECT


def _prompt(problem: Problem) -> Prompt:
    tests = {field: problem[field] for field in ("entry_point", "prompt", "test")}
    return _task(tests, problem["task_id"])


def _task(tests: Mapping[str, Any], name: str = "") -> Prompt:
    return Prompt(index=0, prompt_id=name, text="", token_ids=(), answer=json.dumps(tests))


# -- mutants -----------------------------------------------------------------------------------------------------------


def mutants_pass(found: Sequence[Problem], seed: int) -> dict[str, Any]:
    """Test one mutant of each solution; return how many pass.

    A passing mutant is replaced if it agrees with the original on every input of the problem's tests, because no
    verifier could tell them apart. Known equivalent mutants are not replaced."""
    verify = Programs(EnvironmentConfig(verifier="code", program_cpu_s=2))
    equivalent, redrawn, unexplained = 0, 0, 0
    for problem in found:
        name = problem["task_id"]
        before, solution = problem["prompt"], problem["canonical_solution"]
        for mutant in mutants(before + solution, before.count("\n") + 1, random.Random(f"{seed}/{name}")):
            if not judged(verify, problem, mutant.source):
                break
            if reason := EQUIVALENT.get((name, mutant.change)):
                equivalent += 1
                tell(f"{name}: mutant {mutant.change} passes; it is equivalent: {reason}")
                break
            if differs(problem, mutant.source):
                unexplained += 1
                tell(f"{name}: mutant {mutant.change} passes, although its results differ on the inputs of the tests")
                break
            redrawn += 1
            tell(f"{name}: mutant {mutant.change} passes, as no test input shows the change; drawing another one")
        else:
            unexplained += 1
            tell(f"{name}: every mutant passes")
    return {
        "mutants_pass": equivalent + unexplained,
        "mutants_equivalent": equivalent,
        "mutants_redrawn": redrawn,
    }


_BOTH = """
import copy
names, other, problem = {}, {}, PROBLEM
exec(problem["prompt"] + problem["canonical_solution"], names)
exec(MUTANT, other)
original, mutant = names[problem["entry_point"]], other[problem["entry_point"]]
def candidate(*args):
    expected = original(*copy.deepcopy(args))
    try: found = mutant(*copy.deepcopy(args))
    except Exception: found = candidate
    if found != expected or type(found) is not type(expected): print("differs", flush=True)
    return expected
exec(problem["test"], names)
names["check"](candidate)
"""


def differs(problem: Problem, mutant: str) -> bool:
    """Whether a mutant and the original differ on any input of the problem's tests.
    Runs both in one process without the verifier, as neither is hostile."""
    program = _BOTH.replace("PROBLEM", repr(dict(problem))).replace("MUTANT", repr(mutant))
    sandbox = Sandbox("bubblewrap", memory_mib=1024, processes=8)
    result = sandbox.run(program, b"", Limits(cpu_s=20, wall_s=120, output_bytes=2**24))
    return b"differs" in result.stdout or result.status is not Status.FINISHED


# -- attacks -----------------------------------------------------------------------------------------------------------


def attacks_contained() -> dict[str, Any]:
    every = attacks()
    contained = 0
    with Machine() as machine:
        for attack in every:
            harm = machine.harm(attack)
            contained += not harm
            for what in harm:
                tell(f"attack {attack.name!r}: {what}")
    return {"attacks_contained": contained, "attacks": len(every)}


class Machine:
    """The attacked machine: a secret in its files, environment and tests, and services that must stay unreachable."""

    def __init__(self) -> None:
        self._secret = SECRET + secrets.token_hex(8)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Machine:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-tests-"))
        Path(folder, "tests.json").write_text(self._secret)
        os.environ["AREAL_TESTS"] = self._secret
        self._stack.callback(os.environ.pop, "AREAL_TESTS")
        self._path, self._abstract = f"{folder}/service", os.path.basename(folder)
        kinds = (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, self._path),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self._abstract}"),
        )
        self._services = [self._listening(*kind) for kind in kinds]
        self._sandbox = Sandbox("bubblewrap", memory_mib=ATTACKED.program_memory_mib, processes=8)
        self._verify = Programs(ATTACKED)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 0)
        self._stack.close()

    def _listening(self, family: int, kind: int, address: Any) -> socket.socket:
        service = self._stack.enter_context(socket.socket(family, kind))
        service.bind(address)
        if kind == socket.SOCK_STREAM:
            service.listen()
        service.setblocking(False)
        return service

    def harm(self, attack: Attack, forms: Sequence[str] = FORMS) -> list[str]:
        """Harm that an attack does as a script and as an answer to several forms of tests; empty if it is contained."""
        program = self._aimed(attack.program)
        before, host = set(_children()), os.uname().nodename
        began = time.monotonic()
        result = self._sandbox.run(program, b"1\n", Limits(cpu_s=1, wall_s=4, output_bytes=2**20))
        outcomes = {
            form: self._verify(task, f"```python\n{program}\n```").outcome
            for form, task in self.tasks().items()
            if form in forms
        }
        harm = [f"right as {form}" for form, outcome in outcomes.items() if outcome is Outcome.CORRECT]
        harm += [f"no result as {form}" for form, outcome in outcomes.items() if outcome is Outcome.FAILED]
        harm += [line for line in result.stdout.decode(errors="replace").splitlines() if BREACH in line]
        for pid, _ in set(_children()) - before:
            harm.append(f"left a process: {pid}")
            os.kill(pid, signal.SIGKILL)
        harm += [f"left {path}" for path in _marks()]
        harm += [f"reached {service.getsockname()!r}" for service in self._services if _was_reached(service)]
        if os.uname().nodename != host:
            harm.append("renamed the machine")
        if (took := time.monotonic() - began) > 60:
            harm.append(f"took {took:.0f} s")
        return harm

    def tasks(self) -> dict[str, Prompt]:
        """Tasks with the same question, whose answer is the secret, by form of tests."""
        check = f"def check(candidate):\n    for n in (1, 2):\n        assert candidate(n) == {self._secret!r}\n"
        prompt = 'def answer(n):\n    """The secret."""\n'
        return {
            "check": _task({"entry_point": "answer", "prompt": prompt, "test": check}),
            "calls": _task({"fn_name": "answer", "inputs": [[1], [2]], "outputs": [self._secret] * 2}),
            "scripts": _task({"inputs": ["1\n", "2\n"], "outputs": [self._secret] * 2}),
        }

    def _aimed(self, program: str) -> str:
        ports = [str(service.getsockname()[1]) for service in self._services[:2]]
        aims = {"MARK": MARK, "TCP": ports[0], "UDP": ports[1], "SOCKET": self._path, "ABSTRACT": self._abstract}
        return functools.reduce(lambda text, aim: text.replace(*aim), aims.items(), program)


def _children() -> Iterator[tuple[int, float]]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process.pid, process.create_time()


def _marks() -> list[str]:
    return [str(path) for place in _PLACES for path in Path(place).expanduser().glob(f"{MARK}*")]


def _was_reached(service: socket.socket) -> bool:
    try:
        service.accept() if service.type == socket.SOCK_STREAM else service.recv(1)
    except BlockingIOError:
        return False
    return True


# -- speed -------------------------------------------------------------------------------------------------------------


async def _per_s(found: Sequence[Problem]) -> float:
    """Verdicts per second on correct solutions, with the reward workers of a run."""
    pool = RewardPool(WORKERS, timeout_s=300, function=_verdict)
    try:
        await asyncio.gather(*(pool.ask(found[0]) for _ in range(2 * WORKERS)))  # they have started
        began = time.monotonic()
        await asyncio.gather(*(pool.ask(problem) for problem in found))
        return len(found) / (time.monotonic() - began)
    finally:
        await pool.close()


def _verdict(problem: Problem) -> bool:
    return judged(_programs(), problem, problem["canonical_solution"])


@functools.cache
def _programs() -> Programs:
    return Programs(EnvironmentConfig(verifier="code"))
