"""Look up verifiers and environments by registered name or import path."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from areal_core.config.groups import TASKS, EnvironmentConfig, TaskConfig
from areal_core.config.plugins import check_name, find
from areal_core.config.schema import RunConfig
from areal_core.environments import confinement
from areal_core.environments.calculator import Calculator
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.environment import EnvContext, Environment, SingleTurn, TwoTurn, Verdict, Verifier
from areal_core.environments.mathematics import balanced, compared, conclusion, normalised
from areal_core.environments.procedural import procedural, procedural_share
from areal_core.environments.programs import Programs
from areal_core.environments.verdicts import Judge
from areal_core.errors import ConfigError, ModelError
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Outcome, Prompt

_LONGEST = 600  # characters of an answer; more than twice as long as any gold answer of the benchmarks


def exact_match(task: Prompt, completion: str) -> float:
    """Score 1 if the text after the last `#` is exactly the gold answer, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == task.answer)


def mathematics(task: Prompt, completion: str) -> Verdict:
    """Judge whether the completion's conclusion equals the gold answer (`environments.mathematics`).
    An unreadable answer is incorrect. Comparisons always end, because their steps and numbers are bounded."""
    answer = conclusion(completion)
    if answer is None:
        return Verdict.of(Outcome.NO_ANSWER)
    if not answer or len(answer) > _LONGEST or not balanced(read := normalised(answer)):
        return Verdict.of(Outcome.UNPARSABLE)
    return Verdict.of(Outcome.CORRECT if compared(task.answer, answer) else Outcome.INCORRECT, " ".join(read.split()))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "mathematics": mathematics}


ENVIRONMENTS: dict[str, type[Environment]] = {"single_turn": SingleTurn, "two_turn": TwoTurn, "calculator": Calculator}


def _judge(environment: EnvironmentConfig) -> Verifier:
    """Raises ConfigError for settings that can't work."""
    from areal_core.environments.judge import LanguageModelJudge  # an HTTP client: a fifth of a worker's start

    return LanguageModelJudge(environment)


def _confined(environment: EnvironmentConfig) -> Verifier:
    """Create a reasoning-gym verifier that runs its scorer confined, as environment.sandbox says.
    Raises ConfigError if this kernel can't confine it."""
    confinement.check(environment.sandbox)
    verify = procedural_share if environment.verifier == "reasoning_gym_share" else procedural
    return functools.partial(verify, isolation=environment.sandbox)


CONFIGURED: dict[str, Callable[[EnvironmentConfig], Verifier]] = {  # verifiers with settings
    "code": Programs,
    "judge": _judge,
    "reasoning_gym": _confined,
    "reasoning_gym_share": _confined,
}


def environment_class(config: RunConfig) -> type[Environment]:
    """Find the class `environment.name`. Raises ConfigError if it can't be found or is no Environment."""
    found: object = find("environment.name", config.environment.name, ENVIRONMENTS)
    if isinstance(found, type) and issubclass(found, Environment):
        return found
    raise ConfigError(
        f"environment.name: {config.environment.name} must be a class derived from Environment "
        "(areal_core.environments.environment) with `async def rollout(self, task, policy)`"
    )


def open_environment(
    config: RunConfig,
    tokenizer: Tokenizer,
    on_failure: Callable[[str], None] = lambda failure: None,
    replacement: Callable[[str], Verifier] | None = None,
) -> Environment:
    """Create the configured environment, with its verifier and the functions of environment.rewards.

    `on_failure` is called with each verifier failure. `replacement(name)` replaces the reward function `name`, and the
    verifier for "". Raises ConfigError, with the name of the field, if one of them can't be found."""
    make, parts = environment_class(config), _parts(config.environment)
    context = EnvContext(
        environment=config.environment,
        task=config.task,
        algorithm=config.algorithm,
        tokenizer=tokenizer,
        dialogue=Dialogue(config.task.chat, tokenizer),
        verify=replacement("") if replacement else open_verifier(config.environment, config.task),
        parts={name: (by, replacement(name) if replacement else function) for name, (by, function) in parts.items()},
        on_failure=on_failure,
    )
    try:
        return make(context)
    except ModelError as error:
        raise ConfigError(f"environment: {error}") from error


def _parts(environment: EnvironmentConfig) -> dict[str, tuple[float, Verifier]]:
    """The functions of environment.rewards with their coefficients, by the name after the colon.
    Raises ConfigError."""
    parts: dict[str, tuple[float, Verifier]] = {}
    for part in filter(None, map(str.strip, environment.rewards.split(","))):
        path, _, number = part.partition("=")
        name = path.strip().rpartition(":")[2]
        try:
            coefficient = float(number)
        except ValueError:
            coefficient = math.nan
        if not math.isfinite(coefficient) or name in parts:
            raise ConfigError(
                f"environment.rewards: must be package.module:name=coefficient pairs with distinct names, got {part!r}"
            )
        parts[name] = coefficient, find("environment.rewards", path.strip(), VERIFIERS)
    return parts


def open_verifier(environment: EnvironmentConfig, task: TaskConfig) -> Verifier:
    """Create the verifier `environment.verifier`, or by default the one for the task's gold answers.
    Raises ConfigError if it can't be found, or can't work on this machine."""
    name = verifier_name(environment, task)
    check_name("environment.verifier", name, VERIFIERS | CONFIGURED)
    return CONFIGURED[name](environment) if name in CONFIGURED else find("environment.verifier", name, VERIFIERS)


def open_judge(config: RunConfig, part: str = "") -> Judge:
    """Create a judge outside an environment, with the verifier or with `part` of environment.rewards."""
    if part:
        return Judge(config.environment, _parts(config.environment)[part][1], f"environment.rewards {part}")
    return Judge(config.environment, open_verifier(config.environment, config.task))


def verifier_name(environment: EnvironmentConfig, task: TaskConfig) -> str:
    """The name of the verifier, which also decides how gold answers are parsed.
    Raises ConfigError if a custom task names no verifier."""
    name = environment.verifier or TASKS.get(task.name)
    if name is None:
        raise ConfigError(f"environment.verifier: must be set, as task.name={task.name} has no default verifier")
    return name
