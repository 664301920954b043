"""Shared parts of the benchmarks: command line, progress, order of arms, processes and run histories.

Every result names the revision and the machine that it was measured on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import ArealError

if TYPE_CHECKING:
    from areal_core.config.schema import RunConfig

NEVER = 100_000  # steps between two evaluations beside the training, which would take cores from it


def parser(text: str | None, *, overrides: bool = True) -> argparse.ArgumentParser:
    """Argument parser of a benchmark with docstring `text`.
    With `overrides` of its runs, use `parse_intermixed_args`."""
    made = argparse.ArgumentParser(description=(text or "").partition("\n\n")[0])
    if overrides:
        made.add_argument("overrides", nargs="*", metavar="field=value")
    return made


def numbers(text: str) -> list[int]:
    """Argument type: distinct numbers of at least 0, as in `1,2,3`."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"must be distinct whole numbers of at least 0, as in 1,2,3, got {text}")
    return found


def positive(text: str) -> int:
    """Argument type: a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Argument type: a comma-separated choice, as in `a,b`."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"must be a comma-separated list of {','.join(known)}, got {text}")
        return names

    return chosen


def report(measure: Callable[[], Mapping[str, Any]]) -> None:
    """Run `measure` and print its result and the machine as one line of JSON; print user errors as one line."""
    try:
        print(last_line(measure()))
    except ArealError as error:
        raise SystemExit(f"areal: error: {error}") from None


def tell(line: str) -> None:
    """Print a progress line, apart from the result."""
    print(line, file=sys.stderr, flush=True)


def in_turns(arms: Sequence[str], turn: int) -> list[str]:
    """All arms, in an order that rotates from turn to turn."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


@contextmanager
def scratch_runs() -> Iterator[list[str]]:
    """Overrides for untracked runs that leave no files behind."""
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as state:
        yield [f"state_dir={state}", f"storage.url={state}/storage", "tracking.enabled=false"]


def history(config: RunConfig, run_id: str) -> dict[str, dict[int, float]]:
    """The metrics of a run, by step."""
    from areal_core.run.launcher import run_folder  # not every benchmark has runs, nor what they need installed
    from areal_core.tracking.outbox import Outbox

    with closing(Outbox(run_folder(config, run_id).outbox, run_id)) as outbox:
        return {key: dict(points) for key, points in outbox.history().items()}


def processes(count: int) -> ProcessPoolExecutor:
    """Context manager for fresh processes of one thread each, which end with this process."""
    from areal_core.launch import process
    from areal_core.launch.supervisor import CHILD_ENV

    os.environ.update(CHILD_ENV)  # read when a process starts and when torch is imported there
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn, initializer=process.die_with_parent)


def last_line(result: Mapping[str, Any]) -> str:
    """The result and the machine, as one line of JSON."""
    return json.dumps({**result, "machine": machine()})


def machine() -> dict[str, Any]:
    """Facts about this machine, to relate speeds to.

    They are the revision of these sources ("+" if changed), the processor, the number of usable cores, and the GFLOP/s
    of one large float32 product on one core at this moment."""
    return {
        "revision": revision(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gflops_per_core": round(_product_flops_per_s() / 1e9, 1),
    }


def revision() -> str | None:
    """AREAL_REVISION, or the git revision, with "+" if tracked files have changed; None if neither exists."""
    if named := os.environ.get("AREAL_REVISION"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        asked = [
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or sources without it
    return asked[0] + ("+" if asked[1] else "")


def _processor() -> str:
    """Name of the processor and its widest vector extension: clouds leave the model out of the name."""
    described = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", described, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", described, re.MULTILINE)
    known = flags.group(1).split() if flags else []
    vectors = next((wide for wide in ("avx512f", "avx2") if wide in known), "")
    return " ".join(filter(None, (name.group(1) if name else "", vectors)))


def _product_flops_per_s() -> float:
    import torch

    from areal_core.training.flops import peak_flops_per_s

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = peak_flops_per_s(torch.device("cpu"), torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert measured is not None  # a core is measured, not looked up
    return measured
