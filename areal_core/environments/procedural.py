"""Tasks of reasoning-gym: prompts that it generates without end, and its own verifiers of their answers.

Every prompt is a pure function of (seed, index). A fixed share of all texts, chosen by hash, is kept out of training.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import re
import shlex
from typing import Any

import yaml

from areal_core.config.schema import TaskConfig
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.environment import Verdict
from areal_core.environments.fork_server import ForkServer
from areal_core.environments.held_out import is_held_out
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Outcome, Prompt

_SIZE = 2**40  # that a data set is told to have; it makes each entry from seed and index alone
_HELD_OUT_SEED = 20250530  # the held-out set is the same for every run
_DRAWS = 64  # of one training prompt, of which the first that is not held out counts; one in ten is
_DRAWS_PER_HELD_OUT = 200
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CPU_LIMIT_S = 2.0  # of one answer
_NO_FORMULA = re.compile(r"""["'`:;@\[\]{}\\]|__|\.\s*[^\W\d]""")  # texts, attributes, statements
_FORMULA_NAMES = """
    Symbol Function Integer Float Rational Abs sign sqrt cbrt root exp log ln factorial binomial floor ceiling pi E I oo
    sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh acoth erf
    Pow Add Mul Integral
"""  # what a formula may name; any other name is a symbol, or a function that is not evaluated
_EVALUATING = (  # modules whose score_answer calls eval on an answer, for a Python literal
    "algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens",
)  # fmt: skip
_QUOTES = "\"'`* \t"


class ProceduralSource:
    """Prompts of one data set of reasoning-gym, an endless stream. Raises ConfigError for one that does not exist, or
    not so."""

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer, *, seed: int) -> None:
        assert task.dataset is not None  # config.load sees to it
        self._task, self._dialogue = task, Dialogue(task.chat, tokenizer)
        self._training_seed = int.from_bytes(hashlib.sha256(f"training/{seed}".encode()).digest()[:4])
        self._held_out = self._draw_held_out()

    def prompt(self, index: int) -> Prompt:
        """Raises ConfigError where task.max_prompt_tokens has room for none of its draws."""
        for draw in range(_DRAWS * index, _DRAWS * (index + 1)):
            prompt = self._prompt(index, self._training_seed, draw)
            if not is_held_out(prompt.text) and len(prompt.token_ids) <= self._task.max_prompt_tokens:
                return prompt
        raise ConfigError(f"task.max_prompt_tokens: must be more for {self._task.dataset}, whose prompts are longer")

    def held_out(self) -> list[Prompt]:
        return list(self._held_out)

    def _draw_held_out(self) -> list[Prompt]:
        """The first distinct reserved prompts under a fixed seed."""
        found: dict[str, Prompt] = {}
        for draw in range(_DRAWS_PER_HELD_OUT * self._task.held_out):
            text = entry(self._task.dataset or "", self._task.dataset_options, _HELD_OUT_SEED, draw)["question"]
            if is_held_out(text) and text not in found:
                prompt = self._prompt(len(found), _HELD_OUT_SEED, draw)
                if len(prompt.token_ids) <= self._task.max_prompt_tokens:
                    found[text] = prompt
                    if len(found) == self._task.held_out:
                        return list(found.values())
        raise ConfigError(
            f"task.held_out: {self._task.dataset} has about {len(found)} distinct prompts of at most "
            f"task.max_prompt_tokens={self._task.max_prompt_tokens} tokens that are reserved, got {self._task.held_out}"
        )

    def _prompt(self, index: int, seed: int, draw: int) -> Prompt:
        name, options = self._task.dataset or "", self._task.dataset_options
        made = entry(name, options, seed, draw)
        answer = {"answer": made["answer"], "dataset": name, "options": options, "seed": seed, "draw": draw}
        return Prompt(
            index=index,
            prompt_id=hashlib.sha256(made["question"].encode()).hexdigest(),
            text=made["question"],
            token_ids=self._dialogue.prompt(made["question"]),
            answer=json.dumps(answer),
        )


class Scores:
    """The scores of data sets, a scorer of `areal_core.environments.fork_server`: nine data sets evaluate an answer as
    Python, four by `eval`, five by SymPy's parser. Here these read literals, and formulas, alone."""

    def __init__(self) -> None:
        parser = importlib.import_module("sympy.parsing.sympy_parser")
        sympy = importlib.import_module("sympy")
        names = {
            name: getattr(sympy, name) for name in _FORMULA_NAMES.split()
        }  # the parser's own would reach all of Python
        names |= {"__builtins__": {}, "max": sympy.Max, "min": sympy.Min}
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
        for formula in ("1 + 2*3", "x**2/2 - sin(x)"):
            float(parse_formula(formula, {"x": names["Integer"](1)}))

    def prepare(self, task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A data set and one of its entries, from name, options, seed and draw."""
        names = task["dataset"], task["options"], task["seed"]
        made = entry(*names, task["draw"])
        if made["answer"] != task["answer"]:
            raise ValueError(f"{names[0]} makes other entries here than where the prompt was made")
        return _dataset(*names), made

    def judge(self, prepared: tuple[Any, dict[str, Any]], answer: str) -> float:
        dataset, made = prepared
        return float(dataset.score_answer(answer, made))


def procedural(task: Prompt, completion: str, isolation: str = "confined") -> Verdict:
    """The score that the task's own data set gives to what stands in <answer> tags, or else to the last line. Right is
    what it gives 1. Where it gives nothing to an answer that holds the gold one among other words, the score is the
    share of the gold one in it: what reasoning-gym gives unless a data set has a rule of its own."""
    told = json.loads(task.answer)
    answer = reading(completion)
    if not answer:
        return Verdict.of(Outcome.NO_ANSWER)
    reply = _scores(isolation).ask(told, answer)
    if reply.status == "raised":  # the data set has no score for it
        return Verdict.of(Outcome.UNPARSABLE, answer)
    if reply.status != "done":
        return Verdict.of(Outcome.TIMED_OUT if reply.status == "timed_out" else Outcome.FAILED, answer)
    score = reply.value if isinstance(reply.value, float) and 0.0 <= reply.value <= 1.0 else 0.0
    if score == 1.0:
        return Verdict.of(Outcome.RIGHT, answer)
    gold = str(told["answer"])
    return Verdict(Outcome.WRONG, max(score, len(gold) / len(answer) if gold in answer else 0.0), answer)


@functools.cache
def _scores(isolation: str) -> ForkServer:
    return ForkServer("areal_core.environments.procedural:Scores", cpu_s=_CPU_LIMIT_S, isolation=isolation)


def reading(completion: str) -> str:
    """The answer of a completion: what stands in its last <answer> tags, or else its last line; without quotes and a
    full stop around it."""
    tagged = _TAGGED.findall(completion)
    lines = (tagged[-1] if tagged else completion).strip().splitlines() or [""]
    text = "\n".join(lines) if tagged else lines[-1]
    return text.strip(_QUOTES).removesuffix(".").strip(_QUOTES)


@functools.lru_cache(maxsize=1024)
def entry(dataset: str, options: str, seed: int, draw: int) -> dict[str, Any]:
    """Question, answer and metadata of one entry."""
    return _dataset(dataset, options, seed)[draw]


@functools.lru_cache(maxsize=8)
def _dataset(name: str, options: str, seed: int) -> Any:
    reasoning_gym, known = _reasoning_gym()
    if name not in known:
        raise ConfigError(f"task.dataset: must be a data set of reasoning-gym, got {name!r}")
    settings = _settings(options)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.dataset_options: {name} does not take {options!r}: {error}") from error


def _reasoning_gym() -> tuple[Any, Any]:
    """The package, and its data sets by name."""
    try:
        package = importlib.import_module("reasoning_gym")  # most of a second
        return package, importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError:
        raise ConfigError(
            "task.name: reasoning_gym needs the package reasoning-gym; install it with `make reasoning`"
        ) from None


def _settings(options: str) -> dict[str, Any]:
    try:
        pairs = [word.partition("=") for word in shlex.split(options)]
        return {name: yaml.safe_load(value) for name, _, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"task.dataset_options: must be name=value pairs, got {options!r}: {error}") from error
