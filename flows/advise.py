"""`make advise`: the split of devices between generation and training, by what an earlier run measured.

python -m flows.advise RUN
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_core.config.fields import check_file_name
from areal_core.planning.split import Split, splits_of_run
from areal_core.run.command import Parser, run_command
from areal_core.storage.rundir import RunDir


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="make advise", description="How a run's devices would better be split.")
    parser.add_argument("run", help="its id")
    options = parser.parse_args(arguments)
    table = Table("servers", "ranks", "times as fast", "overrides", title=f"By the rates of {options.run}")
    for split in splits_of_run(_run_dir(options.run)):
        table.add_row(str(split.servers), str(split.ranks), f"{split.ratio:.2f}", " ".join(split.overrides))
    Console().print(table)


def _run_dir(run_id: str) -> RunDir:
    return RunDir(Path(".areal").absolute() / "runs" / check_file_name("run", run_id))


def best(run_id: str) -> Split:
    """The best split by the rates of a run in the default place. Raises ConfigError."""
    return splits_of_run(_run_dir(run_id))[0]


if __name__ == "__main__":
    sys.exit(run_command(main))
