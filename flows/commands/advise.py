"""`areal advise`: suggest a split of devices between generation and training, by a run's rates."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from areal_core.config.fields import check_file_name
from areal_core.planning.split import Split, splits_of_run
from areal_core.run.command import run_command
from areal_core.storage.rundir import RunDir
from flows import cli
from flows.places import WORK


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: run(arguments))


def run(arguments: Sequence[str]) -> None:
    """Print the splits, best first. Raises ConfigError."""
    parser = cli.parser("advise", "MY-RUN")
    parser.add_argument("run", help="name of a finished run")
    options = parser.parse_args(arguments)
    table = Table("servers", "ranks", "speedup", "overrides", title=f"Splits by the rates of {options.run}")
    for split in splits_of_run(_run_dir(options.run)):
        table.add_row(str(split.servers), str(split.ranks), f"{split.ratio:.2f}", " ".join(split.overrides))
    Console().print(table)


def _run_dir(run_id: str) -> RunDir:
    return RunDir(WORK / ".areal" / "runs" / check_file_name("run", run_id))


def best(run_id: str) -> Split:
    """The best split by the rates of a run in `.areal/runs`. Raises ConfigError."""
    return splits_of_run(_run_dir(run_id))[0]
