"""Generate entries of reasoning-gym's data sets, and score answers: two scorers for `fork_server`.

Imports are few, because every loaded library makes each fork more expensive.
"""

from __future__ import annotations

import ast
import base64
import functools
import importlib
import pickle
import random
import re
import shlex
import sys
from types import ModuleType
from typing import Any

import yaml

from areal_core.errors import ConfigError

_SIZE = 2**40  # nominal size of a data set, which makes each entry only from seed and index
_SIZES = {  # of data sets that draw for all entries at creation; primes, because draws have factors of 2
    "acre": 4093, "gsm_symbolic": 1048573, "list_functions": 1048573, "word_ladder": 16381,
}  # fmt: skip
_NO_FORMULA = re.compile(r"""["'`:;@\[\]{}\\]|__|\.\s*[^\W\d]""")  # texts, attributes and statements
_FORMULA_NAMES = """
    Symbol Function Integer Float Rational Abs sign sqrt cbrt root exp log ln factorial binomial floor ceiling pi E I oo
    sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh acoth erf
    Pow Add Mul
"""  # names allowed in a formula; any other name is a symbol, or a function that is not evaluated
_EVALUATING = (  # modules whose score_answer calls eval on an answer to read a Python literal
    "algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens",
)  # fmt: skip
_DRAWING = (
    "matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot", "mpl_toolkits",
    "mpl_toolkits.mplot3d", "drawsvg",
)  # fmt: skip


class Scores:
    """Score answers; a scorer for `areal_core.environments.fork_server`.

    Nine data sets evaluate an answer as Python: four by `eval`, five by SymPy's parser. This class restricts them to
    literals and formulas.
    """

    def __init__(self) -> None:
        parser = importlib.import_module("sympy.parsing.sympy_parser")
        sympy = importlib.import_module("sympy")
        # The parser's default names would give access to all of Python.
        names = {name: getattr(sympy, name) for name in _FORMULA_NAMES.split()}
        names |= {"__builtins__": {}, "max": sympy.Max, "min": sympy.Min, "abs": abs, "pow": pow, "round": round}
        parse = parser.parse_expr

        def parse_formula(text: str, local_dict: dict[str, Any] | None = None, **how: Any) -> Any:
            if _NO_FORMULA.search(text):
                raise ValueError("not a formula")
            return parse(text, **{"local_dict": local_dict, "global_dict": names} | how)

        for module in (parser, sympy):  # before data sets import it by name
            vars(module)["parse_expr"] = parse_formula
        _reasoning_gym()
        for module in _EVALUATING:
            vars(importlib.import_module(f"reasoning_gym.{module}"))["eval"] = ast.literal_eval
        halting = importlib.import_module("reasoning_gym.algorithmic.game_of_life_halting")
        vars(halting)["bool"] = str.lower  # the original takes every text for True
        for formula in ("1 + 2*3", "x**2/2 - sin(x)"):
            float(parse_formula(formula, {"x": names["Integer"](1)}))

    def prepare(self, task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Create a data set and one of its entries, from name, options, seed and draw."""
        names = task["dataset"], task["options"], task["seed"]
        made = entry(*names, task["draw"])
        if made["answer"] != task["answer"]:
            raise ValueError(f"{names[0]} generates different entries here than where the prompt was generated")
        return _dataset(*names), made

    def judge(self, prepared: tuple[Any, dict[str, Any]], answer: str) -> float:
        dataset, made = prepared
        return float(dataset.score_answer(answer, made))


class Entries:
    """Generate entries in `prepare`; there are no answers to judge."""

    def prepare(self, task: tuple[str, str, int, int]) -> str:
        """Generate an entry from data set, options, seed and draw. Returns it pickled, in base 85."""
        return base64.b85encode(pickle.dumps(entry(*task))).decode()


class _Undrawn(ModuleType):
    """Replaces a drawing library, which no score needs: every attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@functools.lru_cache(maxsize=1024)
def entry(dataset: str, options: str, seed: int, draw: int) -> dict[str, Any]:
    """Generate question, answer and metadata of one entry.
    Some also depend on PYTHONHASHSEED; see `procedural.entry`."""
    random.seed(f"{seed}/{draw}")  # list_functions draws from the global generator
    made: dict[str, Any] = _dataset(dataset, options, seed)[draw % _SIZES.get(dataset, _SIZE)]
    if dataset == "intermediate_integration" and "Integral(" in made["answer"]:  # the answer only restates the question
        sympy, told = importlib.import_module("sympy"), made["metadata"]
        x = sympy.Symbol(told["variable"])
        made["answer"] = f"{sympy.integrate(sympy.parse_expr(told['integrand'], {str(x): x}), x)} + C"
    return made


@functools.lru_cache(maxsize=8)
def _dataset(name: str, options: str, seed: int) -> Any:
    reasoning_gym, known = _reasoning_gym()
    if name not in known:
        raise ConfigError(f"task.dataset: must be a data set of reasoning-gym, got {name!r}")
    settings = _settings(options)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=_SIZES.get(name, _SIZE), **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.dataset_options: {name} does not accept {options!r}: {error}") from error


def _reasoning_gym() -> tuple[Any, Any]:
    """The package reasoning_gym, and its data sets by name. Raises ConfigError if it is not installed."""
    for module in _DRAWING:
        sys.modules.setdefault(module, _Undrawn(module))
    try:
        package = importlib.import_module("reasoning_gym")  # takes most of a second
        return package, importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError:
        raise ConfigError(
            "task.name: the package reasoning-gym is not installed; install it with `make reasoning`"
        ) from None


def _settings(options: str) -> dict[str, Any]:
    try:
        pairs = [word.partition("=") for word in shlex.split(options)]
        return {name: yaml.safe_load(value) for name, _, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"task.dataset_options: must be name=value pairs, got {options!r}: {error}") from error
