"""`areal advise`: suggest a split of devices between generation and training, by a run's rates."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from areal_core.config.fields import check_file_name
from areal_core.config.schema import RunConfig
from areal_core.planning.split import Split, splits_of_run
from areal_core.storage.rundir import RunDir
from flows import cli
from flows.compose import compose
from flows.places import WORK


def main(arguments: Sequence[str]) -> None:
    """Print the splits, best first. Raises ConfigError."""
    parser = cli.parser("advise", "MY-RUN", "MY-RUN state_dir=/data/areal")
    parser.add_argument("run", help="name of a finished run")
    cli.add_settings(parser, "; state_dir= is the folder of runs")
    options = parser.parse_intermixed_args(arguments)
    table = Table("servers", "ranks", "speedup", "overrides", title=f"Splits by the rates of {options.run}")
    for split in splits(options.run, compose("cpu-async", options.settings)):
        table.add_row(str(split.servers), str(split.ranks), f"{split.ratio:.2f}", " ".join(split.overrides))
    Console().print(table)


def splits(run_id: str, config: RunConfig) -> list[Split]:
    """Splits by the rates of a run in the state folder of `config`, best first. Raises ConfigError."""
    return splits_of_run(RunDir(WORK / config.state_dir / "runs" / check_file_name("run", run_id)))
