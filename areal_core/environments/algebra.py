r"""Equality of formulas, told by a computer algebra system in a process of its own.

    Algebra().compare(r"2\sqrt{2}", r"\sqrt{8}") -> Outcome.RIGHT

SymPy may simplify for ever, or multiply until the memory is full. So one process imports it, and does nothing but fork
children, one after the other. A child compares formulas until one costs it more CPU time than is allowed: then the
kernel ends it, in the middle of a multiplication too, and its successor is there within milliseconds. It is CPU time
that counts, so that a busy machine turns no honest answer into one that took too long.

    python -m areal_core.environments.algebra FD SECONDS    # an open pipe; ends when its other side does
"""

from __future__ import annotations

import functools
import json
import logging
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from areal_core.errors import RewardError
from areal_core.types import Outcome

CPU_LIMIT_S = 1.0  # of one comparison
_MEMORY = 2 * 2**30  # bytes of address space
_START_TIMEOUT_S = 120.0  # it imports SymPy, on a machine that may be busy
_REPLY_TIMEOUT_S = 60.0  # of wall time: CPU time has a limit of its own


class Algebra:
    """A process that compares formulas, one pair after the other. It ends with `close`, or with this process."""

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "areal_core.environments.algebra", str(theirs.fileno()), str(cpu_limit_s)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._reply(_START_TIMEOUT_S)

    def compare(self, gold: str, answer: str) -> Outcome:
        """RIGHT or WRONG; UNPARSABLE for an answer that is no formula; TIMED_OUT beyond the limit of CPU time or
        memory; FAILED where the gold answer is no formula, or the comparison breaks. Raises RewardError when the
        process is gone."""
        try:
            self._pipe.send_bytes(json.dumps([gold, answer]).encode())
        except OSError as error:
            raise RewardError(f"the process that compares formulas is gone: {error}") from error
        return Outcome(self._reply(_REPLY_TIMEOUT_S))

    def close(self) -> None:
        self._pipe.close()
        self.process.wait()

    def _reply(self, timeout_s: float) -> str:
        """As text: what has read hostile formulas is not trusted with pickles."""
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv_bytes().decode()
        except (EOFError, OSError) as error:
            raise RewardError(f"the process that compares formulas is gone: {error}") from error
        raise RewardError(f"the process that compares formulas did not reply within {timeout_s:g} s")


# -- in the process ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, cpu_limit_s: float) -> None:
    """Fork one child after the other, until the other side of the pipe is closed. Where one dies over a question, it
    is this process that replies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; it is told to end otherwise
    logging.disable(logging.CRITICAL)  # math-verify warns of every formula that it can't read
    compare(r"\frac{x}{2}", "x/2")  # what is imported and built late is there before the first fork
    pipe.send_bytes(b"ready")
    busy = mmap.mmap(-1, 1)  # shared with the child: 1 while it is at a question
    while (child := os.fork()) != 0:
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        if not busy[0]:
            continue
        busy[0] = 0
        timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        try:
            pipe.send_bytes((Outcome.TIMED_OUT if timed_out else Outcome.FAILED).encode())
        except OSError:
            return
    _answer(pipe, busy, cpu_limit_s)


def _answer(pipe: Connection, busy: mmap.mmap, cpu_limit_s: float) -> None:
    """The child. SIGPROF ends it when the timer of its own CPU time runs out."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        try:
            gold, answer = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        busy[0] = 1
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        outcome = compare(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        busy[0] = 0
        try:
            pipe.send_bytes(outcome.encode())
        except OSError:
            return


def compare(gold: str, answer: str) -> Outcome:
    """As `Algebra.compare`, in this process and without limits."""
    from math_verify import verify
    from sympy import Expr, Symbol, simplify

    try:
        expected, found = _parsed(gold), _parsed(answer)
        if expected is None or found is None:
            return Outcome.FAILED if expected is None else Outcome.UNPARSABLE
        equal = verify(expected, found, timeout_seconds=None)
        symbol = isinstance(found, Symbol) or isinstance(expected, Symbol)  # which it compares by name alone
        if not equal and symbol and isinstance(found, Expr) and isinstance(expected, Expr):
            equal = simplify(expected - found) == 0
        return Outcome.RIGHT if equal else Outcome.WRONG
    except MemoryError:
        return Outcome.TIMED_OUT
    except Exception:  # noqa: BLE001 - the boundary to SymPy, which raises whatever it meets
        return Outcome.FAILED


_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*d\s*(?:\^\s*\{?(?P<order>\d)\}?)?\s*(?P<of>\\?[a-zA-Z]+(?:_\{?\w\}?)?)\s*\}"
    r"\s*\{\s*d\s*(?P<by>\\?[a-zA-Z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)


@functools.lru_cache(maxsize=4096)
def _parsed(formula: str) -> Any:
    """A SymPy expression; None for what is no formula. A derivative is a symbol of its own: SymPy would take that of a
    symbol by another for zero, and so dx/dt for dt/dx."""
    from math_verify.grader import should_treat_as_complex
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex

    spelling = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        text = normalize_latex(_DERIVATIVE.sub(_derivative, formula), spelling)
        return latex2sympy(
            text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the boundary to its parser, likewise
        return None


def _derivative(found: re.Match[str]) -> str:
    letters = "".join(character for character in found["of"] + "by" + found["by"] if character.isalnum())
    return rf"D_{{{letters}{found['order'] or ''}}}"


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
