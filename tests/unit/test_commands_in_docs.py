"""Commands in the documentation: `areal` accepts each one, with its options, fields and choices."""

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from areal_core.run.command import Parser
from docs.gen import hook
from flows.cli import COMMANDS
from flows.commands.compare import parameters
from flows.commands.setup import PARTS
from flows.compose import EVALUATION, benchmark_configs, compose, split_experiment, swept

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml")]
CALL = r"(?:[A-Z_]+=\S+ )*areal "
COMMAND = re.compile(rf"^ *{CALL}((?:.*\\\n)*.*)$|`{CALL}([^`]+)`", re.MULTILINE)  # in a block, or in a sentence
PLACEHOLDERS = {"COMMAND": "train", "experiment=NAME": "experiment=cpu-async", "...": "seed=1"}
REQUIRED = ("model.path=m", "task.path=t", "task.held_out_path=h")  # of some experiments


class Parsed(BaseException):
    """Carries the options of a command, which would now run."""


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command without running it. Raises ConfigError."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command.replace("\\\n", " "), comments=True)]
    name, *rest = (re.sub(r"^seed=\d+,.*", "seed=1", word) for word in words)  # each seed takes as long to compose
    if name == "--help":
        return
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name}")
    options: dict = {}
    with monkeypatch.context() as patched:
        for method in ("parse_args", "parse_intermixed_args"):
            real = getattr(Parser, method)
            patched.setattr(Parser, method, lambda *args, real=real: (_ for _ in ()).throw(Parsed(real(*args))))
        patched.setattr("flows.watch.run_command", lambda _name, _deployment, chosen: chosen())
        try:
            import_module(f"flows.commands.{'try_' if name == 'try' else name}").main(rest)
        except Parsed as found:
            options = vars(found.args[0])
        except SystemExit:
            assert "--help" in rest
    if unknown := {part for part in options.get("parts", ()) if not part.isupper()} - PARTS.keys():
        raise ConfigError(f"unknown parts {unknown}")
    settings = [word for word in options.get("settings", ()) if not re.match(r"experiment=\S+\.yaml$", word)]
    if "benchmarks" in options:
        benchmark_configs(options["model"], options["benchmarks"], overrides=settings)
    elif arms := options.get("arm"):
        known = ["known: mode=sync"] if options["name"] else []  # stands for the arms of a comparison that continues
        parameters([*REQUIRED, *settings], [*arms, *known], "of-no-page")
    elif settings:
        experiment, overrides = split_experiment(settings, EVALUATION if name == "doctor" else "cpu-async")
        if options.get("multirun"):
            overrides, varied, _ = swept(overrides)
            overrides += [f"{field}={value}" for field, values in varied.items() for value in values]
        compose(experiment, [*REQUIRED, *overrides])


def commands() -> Iterator[tuple[str, str]]:
    """Every command with its place. Sentences name some without their arguments: `areal evaluate`."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in FILES} | {"--help": hook.command_line()}
    for place, text in texts.items():
        for match in COMMAND.finditer(text):
            if match[2] not in COMMANDS:
                yield f"{place}:{text.count(chr(10), 0, match.start()) + 1}", match[1] or match[2]


@pytest.mark.slow
def test_commands_in_docs_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, found = [], list(commands())
    for place, command in found:
        try:
            check(command, monkeypatch)
        except ConfigError as error:
            wrong.append(f"{place}: areal {command}: {error}")
    assert len(found) > 80
    assert wrong == []


WRONG = """trian; train --cgf job; train experiment=cpu-tool; train training.step=5; train algorithm=grpo2; down --all
train training.steps=many; train -m algorithm=grpo,grpo2; compare --arm 'a: mode=sink'; setup vlm; evaluate m -b gsm"""


@pytest.mark.parametrize("command", re.split("; |\n", WRONG))
def test_wrong_commands_are_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        check(command, monkeypatch)
