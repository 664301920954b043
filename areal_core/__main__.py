"""`python -m areal_core`: one run on this machine, without Prefect and Hydra. Exit status:

- 0: the run ended in order
- 1: the run failed
- 2: a setting, a model, the storage or the tracking server is wrong
- 130 or 143: SIGINT or SIGTERM stopped the command, after it had stopped every process that it started
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_core.config.files import configuration
from areal_core.run.command import Parser, run_command
from areal_core.run.launcher import execute
from areal_core.run.progress import RunProgress, conclude


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    options = _parse(arguments)
    config = configuration({} if options.config is None else options.config, options.overrides)
    progress = RunProgress()
    summary = execute(config, run_id=options.run_id, log=progress.log, on_status=progress.update)
    print(conclude(summary))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m areal_core", description="Run one experiment on this machine.")
    parser.add_argument("--run-id", help="name of the run; an existing run of this name resumes")
    parser.add_argument(
        "--config", type=Path, help="YAML or JSON configuration file; omitted fields have their defaults"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="FIELD=VALUE", help="override of a field, such as training.steps=5"
    )
    return parser.parse_intermixed_args(arguments)  # options may stand between overrides


if __name__ == "__main__":
    sys.exit(main())
