"""`python -m areal_core`: one run on this machine, without Prefect and Hydra. Exit status:

- 0: the run ended in order
- 1: the run failed
- 2: a setting, a model, the storage or the tracking server is wrong
- 130 or 143: SIGINT or SIGTERM stopped the command, after it had stopped every process that it started
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError, one_line
from areal_core.run.command import Parser, run_command
from areal_core.run.launcher import execute
from areal_core.run.progress import RunProgress, conclude


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    options = _parse(arguments)
    config = configuration(options.config, options.overrides)
    progress = RunProgress()
    summary = execute(config, run_id=options.run_id, log=progress.log, on_status=progress.update)
    print(conclude(summary))


def configuration(file: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration in a YAML or JSON file, with overrides such as `training.steps=5` applied.
    Raises ConfigError."""
    values: Any = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text()) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:  # e.g. numbers with too many digits, or invalid UTF-8
            reason = error.strerror if isinstance(error, OSError) else one_line(error)
            raise ConfigError(f"--config: can't read {file}: {reason}") from error
        if not isinstance(values, Mapping):
            raise ConfigError(f"--config: {file} must hold fields and their values")
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"{override or repr(override)}: an override looks like training.steps=5")
        try:
            value = yaml.safe_load(text)
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{name}: {text!r:.80} is not a value: {one_line(error)}") from error
        values = merge(values, name, value)
    return load(values)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m areal_core", description="Run one experiment on this machine.")
    parser.add_argument("--run-id", help="name of the run; an existing run of this name resumes")
    parser.add_argument("--config", type=Path, help="YAML or JSON; fields that it leaves out have their defaults")
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="for instance training.steps=5")
    return parser.parse_intermixed_args(arguments)  # options may stand between overrides


if __name__ == "__main__":
    sys.exit(main())
