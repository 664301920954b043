"""Verifiers, and environments and verifiers by name: registered ones, and import paths."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from areal_core.config.groups import TASKS
from areal_core.config.plugins import check_name, find
from areal_core.config.schema import EnvironmentConfig, RunConfig, TaskConfig
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

_LONGEST = 600  # characters of an answer; no gold answer of the benchmarks has half as many


def exact_match(task: Prompt, completion: str) -> float:
    """1 if the text after the last `#` is the gold answer, character by character, else 0."""
    _, mark, conclusion = completion.rpartition("#")
    return float(bool(mark) and conclusion == task.answer)


def mathematics(task: Prompt, completion: str) -> Verdict:
    """Whether the completion's conclusion equals the gold answer; see `areal_core.environments.mathematics`. An answer
    that can't be read is a wrong one. Every comparison ends: its steps and its numbers are bounded."""
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
    """A verifier whose scorer interprets what it reads, as environment.sandbox says. Raises ConfigError where this
    kernel can't."""
    confinement.check(environment.sandbox)
    verify = procedural_share if environment.verifier == "reasoning_gym_share" else procedural
    return functools.partial(verify, isolation=environment.sandbox)


CONFIGURED: dict[str, Callable[[EnvironmentConfig], Verifier]] = {  # verifiers that have settings
    "code": Programs,
    "judge": _judge,
    "reasoning_gym": _confined,
    "reasoning_gym_share": _confined,
}


def environment_class(config: RunConfig) -> type[Environment]:
    """The class that `environment.name` names. Raises ConfigError, naming the field, for one that can't be found, or is
    no Environment."""
    found: object = find("environment.name", config.environment.name, ENVIRONMENTS)
    if isinstance(found, type) and issubclass(found, Environment):
        return found
    raise ConfigError(
        f"environment.name: {config.environment.name} must be a class derived from Environment "
        "(areal_core.environments.environment) with `async def rollout(self, task, policy)`; rollout_group is gone"
    )


def open_environment(
    config: RunConfig,
    tokenizer: Tokenizer,
    on_failure: Callable[[str], None] = lambda failure: None,
    instead: Callable[[str], Verifier] | None = None,
) -> Environment:
    """The environment that `config` names, with its verifier and the functions of environment.rewards; `on_failure` is
    told what these fail with. `instead` gives what takes the place of a function of environment.rewards, by its name,
    and of the verifier, by "". Raises ConfigError, naming the field, for one that can't be found."""
    make, parts = environment_class(config), _parts(config.environment)
    context = EnvContext(
        environment=config.environment,
        task=config.task,
        algorithm=config.algorithm,
        tokenizer=tokenizer,
        dialogue=Dialogue(config.task.chat, tokenizer),
        verify=instead("") if instead else open_verifier(config.environment, config.task),
        parts={name: (by, instead(name) if instead else function) for name, (by, function) in parts.items()},
        on_failure=on_failure,
    )
    try:
        return make(context)
    except ModelError as error:
        raise ConfigError(f"environment: {error}") from error


def _parts(environment: EnvironmentConfig) -> dict[str, tuple[float, Verifier]]:
    """The functions of environment.rewards, by what stands behind the colon. Raises ConfigError."""
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
                f"environment.rewards: must be package.module:name=coefficient, each name once, got {part!r}"
            )
        parts[name] = coefficient, find("environment.rewards", path.strip(), VERIFIERS)
    return parts


def open_verifier(environment: EnvironmentConfig, task: TaskConfig) -> Verifier:
    """The verifier that `environment.verifier` names, or the one that the task's gold answers are written for. Raises
    ConfigError as `open_environment` does, and for one that can't work on this machine."""
    name = verifier_name(environment, task)
    check_name("environment.verifier", name, VERIFIERS | CONFIGURED)
    return CONFIGURED[name](environment) if name in CONFIGURED else find("environment.verifier", name, VERIFIERS)


def open_judge(config: RunConfig, part: str = "") -> Judge:
    """The judge of completions outside of an environment: with the verifier, or a function of environment.rewards."""
    if part:
        return Judge(config.environment, _parts(config.environment)[part][1], f"environment.rewards {part}")
    return Judge(config.environment, open_verifier(config.environment, config.task))


def verifier_name(environment: EnvironmentConfig, task: TaskConfig) -> str:
    """The name of the verifier that judges, and that gold answers are read for. Raises ConfigError where a task of
    one's own is given none."""
    name = environment.verifier or TASKS.get(task.name)
    if name is None:
        raise ConfigError(f"environment.verifier: must be given, who judges {task.name}?")
    return name
