"""`make prune`: shows what old runs hold, and deletes what is chosen.

    python -m flows.prune_command [--run NAME] ... [--older 30d] [--yes] [field=value ...]

Without --run and --older it offers to delete leftovers of dead launchers, which no run needs. It never touches a run
that is running. Exit status: 0 done, or only shown; 1 something was not deleted; 2 a setting, or the store, is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from areal_core.errors import ArealError, ConfigError, ProcessError
from areal_core.run.command import Parser, run_command
from areal_core.run.prune import KINDS, HeldRun, delete, free_leftovers, held_runs
from flows.compose import compose

_WIDTH = 160  # columns, where no terminal has its own
_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: _prune(_parse(arguments)))


def _prune(options: argparse.Namespace) -> None:
    chooses = bool(options.run or options.older)
    age_s = _seconds(options.older) if options.older else 0.0
    config = compose("cpu-async", options.overrides)
    runs = held_runs(config, print)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_table(runs) if runs else f"No runs in {config.state_dir}/runs and {config.storage.url}.")
    plan: list[tuple[HeldRun, int, Callable[..., object]]] = []
    for run in _chosen(runs, options.run, age_s) if chooses else runs:
        if chooses or run.state == "half deleted":
            plan.append((run, run.bytes.total(), delete))
        elif run.leftovers:
            plan.append((run, run.leftovers, free_leftovers))
    size = _shown(size for _, size, _ in plan)
    if chooses:
        print(f"\nTo delete: {', '.join(run.run_id for run, _, _ in plan) or 'nothing'} ({size}, models included)")
    else:
        print(f"\nTo delete: leftovers of {len(plan)} runs ({size}), which no resume needs.")
        print("Whole runs: RUN=NAME or OLDER=30d.")
    if not plan:
        return
    if not options.yes and not (sys.stdin.isatty() and input("Type yes to do it: ") == "yes"):
        if chooses or sys.stdin.isatty():
            raise ProcessError("nothing was deleted: it takes a yes, or --yes (YES=1)")
        return
    failed = 0
    for run, size, action in plan:
        try:
            action(run, config, print)
            print(f"{run.run_id}: {_shown([size])} freed")
        except (ArealError, OSError) as error:
            failed += 1
            print(f"{run.run_id}: not deleted, try again: {error}")
    if failed:
        raise ProcessError(f"{failed} of {len(plan)} could not be deleted")


def _chosen(runs: Sequence[HeldRun], names: Sequence[str], age_s: float) -> list[HeldRun]:
    """The runs of these names, or all, that have not changed for so long and do not run. Raises ConfigError."""
    known = {run.run_id: run for run in runs}
    for name in names:
        if name not in known:
            raise ConfigError(f"RUN: there is no run {name}; `make prune` lists all")
        if known[name].state == "running":
            raise ConfigError(f"RUN: {name} is running; stop it first")
    before = time.time() - age_s
    return [
        run for run in runs if run.state != "running" and run.changed <= before and (not names or run.run_id in names)
    ]


def _table(runs: Sequence[HeldRun]) -> Table:
    kinds = [kind for kind in KINDS if any(run.bytes[kind] for run in runs)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True)
    for name in ("last change", "state"):
        table.add_column(name, no_wrap=True)
    for name in (*kinds, "in all", "leftovers"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        sizes = (*(run.bytes[kind] for kind in kinds), run.bytes.total(), run.leftovers)
        table.add_row(run.run_id, _ago(run.changed), run.state, *(_shown([size]) if size else "-" for size in sizes))
    if len(runs) > 1:
        sums = [sum(run.bytes[kind] for run in runs) for kind in kinds]
        sums += [sum(sums), sum(run.leftovers for run in runs)]
        table.add_row(f"{len(runs)} runs", "", "", *(_shown([size]) if size else "-" for size in sums), style="bold")
    return table


def _shown(sizes: Iterable[int]) -> str:
    """The sum of some bytes, with two digits at least."""
    size, unit = float(sum(sizes)), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.{1 if unit and size < 10 else 0}f} {_UNITS[unit]}"


def _ago(at: float) -> str:
    hours = max(time.time() - at, 0.0) / 3600
    for number, name in ((hours / 24, "day"), (hours, "hour"), (60 * hours, "minute")):
        if number >= 1:
            return f"{number:.0f} {name}{'' if round(number) == 1 else 's'} ago"
    return "just now"


def _seconds(text: str) -> float:
    if not (match := re.fullmatch(r"(\d+)([hdw])", text)):
        raise ConfigError(f"OLDER: must be a number of hours, days or weeks, as in 12h, 30d or 4w, got {text!r}")
    return int(match[1]) * _SECONDS[match[2]]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="make prune", description="What old runs hold, and how to free it.")
    parser.add_argument("--run", action="append", default=[], metavar="NAME", help="delete this run; again for others")
    parser.add_argument("--older", metavar="30d", help="delete runs that have not changed for so long")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="field=value", help="as storage.url=s3://bucket/prefix"
    )
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
