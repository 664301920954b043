"""`areal prune`: show the files of old runs, and delete chosen runs.

Without --run and --older it offers to delete leftovers of dead launchers, which no run needs. It never touches a run
that is running.

Exit status 0: done, or only shown. Exit status 1: a deletion failed. Exit status 2: a setting or the store is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from areal_core.errors import ArealError, ConfigError, ProcessError
from areal_core.run.prune import StoredRun, delete, free_leftovers, stored_runs
from flows import cli
from flows.compose import compose

_WIDTH = 160  # columns, without a terminal


def main(arguments: Sequence[str]) -> None:
    """Show the runs, ask, and delete.
    Raises ConfigError, and ProcessError if a deletion failed or was not confirmed."""
    parser = cli.parser("prune", "", "--run OLD-RUN --run OTHER", "--older 30 --yes storage.url=s3://bucket/prefix")
    parser.add_argument(
        "--run", action="append", default=[], metavar="NAME", help="delete this run; repeat for several runs"
    )
    parser.add_argument(
        "--older", type=float, metavar="DAYS", help="delete runs that have not changed for this many days"
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    cli.add_settings(parser)
    options = parser.parse_intermixed_args(arguments)
    chooses = bool(options.run) or options.older is not None
    config = compose("cpu-async", options.settings)
    runs = stored_runs(config, print)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table(runs) if runs else f"No runs in {config.state_dir}/runs and {config.storage.url}.")
    plan: list[tuple[StoredRun, int, Callable[..., None]]] = []
    for run in _chosen(runs, options.run, 86400.0 * (options.older or 0.0)) if chooses else runs:
        if chooses or run.state == "half deleted":
            plan.append((run, run.local_bytes + run.stored_bytes, delete))
        elif run.leftover_bytes:
            plan.append((run, run.leftover_bytes, free_leftovers))
    size = decimal(sum(size for _, size, _ in plan))
    if chooses:
        print(f"\nTo delete: {', '.join(run.run_id for run, _, _ in plan) or 'nothing'} ({size}, models included)")
    else:
        print(f"\nTo delete: leftovers of {len(plan)} runs ({size}). No resume needs them.")
        print("To delete whole runs, give --run NAME or --older DAYS.")
    if not plan:
        return
    if not options.yes and not (sys.stdin.isatty() and input("Type yes to delete: ") == "yes"):
        if chooses or sys.stdin.isatty():
            raise ProcessError("not confirmed, so nothing was deleted; answer yes, or give --yes")
        return
    failed = 0
    for run, size, action in plan:
        try:
            action(run, config, print)
            print(f"{run.run_id}: {decimal(size)} freed")
        except (ArealError, OSError) as error:
            failed += 1
            print(f"{run.run_id}: could not be deleted, repeat the command: {error}")
    if failed:
        raise ProcessError(f"{failed} of {len(plan)} runs could not be deleted")


def _chosen(runs: Sequence[StoredRun], names: Sequence[str], age_s: float) -> list[StoredRun]:
    """Runs with these names, or all, that have not changed for `age_s` seconds and are not running.
    Raises ConfigError."""
    known = {run.run_id: run for run in runs}
    for name in names:
        if name not in known:
            raise ConfigError(f"--run: unknown run {name}; `areal prune` lists all runs")
        if known[name].state == "running":
            raise ConfigError(f"--run: {name} is running; stop it first")
    before = time.time() - age_s
    named = [known[name] for name in dict.fromkeys(names)] or runs
    return [run for run in named if run.state != "running" and run.changed <= before]


def _table(runs: Sequence[StoredRun]) -> Table:
    table = Table(Column("run", no_wrap=True), "last change", "state", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("on this machine", "in the store", "leftovers"):
        table.add_column(name, justify="right")
    for run in runs:
        sizes = (run.local_bytes, run.stored_bytes, run.leftover_bytes)
        changed = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
        table.add_row(run.run_id, changed, run.state, *(decimal(size) if size else "-" for size in sizes))
    return table
