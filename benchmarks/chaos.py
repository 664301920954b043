"""Does a run survive hundreds of faults? An independent checker examines every run afterwards.

The benchmark kills and stops processes of real runs, at random and at every named point. It cuts the power of machines.
It makes stores, files and messages fail, tear, flip bits, repeat and arrive late. docs/reliability.md has the method,
the promises and the limits. `--short` takes a few minutes. A seed reproduces faults in one process exactly (objects).
In real runs it reproduces the choice of faults, not their exact times.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import _harness
from tests.faults import objects, outside, processes, stack
from tests.faults.checker import Findings, totals
from tests.faults.points import POINTS, Point
from tests.support import radosgw

PARTS = ("processes", "repeated", "surroundings", "outages", "power", "objects", "messages")
_POINTS_A_RUN = 26
_FAULTS_A_RUN = 22  # at random
_LOSSES_A_RUN = 5


class Chaos:
    """All parts of one benchmark, and their results."""

    def __init__(self, folder: Path, seed: int, *, short: bool) -> None:
        self._folder = folder
        self._seed = seed
        self._short = short
        self.findings: list[Findings] = []
        self.process_faults: Counter[str] = Counter()
        self.object_faults: Counter[str] = Counter()
        self.points: set[str] = set()
        self.recovery_s: dict[str, list[float]] = {kind: [] for kind in processes.TIMED}
        self.power_offs = 0
        self.clock_jumps = 0
        self.comparison: dict[str, Any] = {}

    def processes(self) -> None:
        """Kill processes of runs with an evaluator, a tracker or several ranks, until every point was hit."""
        wanted = 40 if self._short else 260
        left = list(POINTS)
        random.Random(self._seed).shuffle(left)
        for turn in range(4 if self._short else 14):
            if sum(self.process_faults.values()) >= wanted and (self._short or not left):
                break
            # Those that only a run on another machine reaches, or one at its end, come with the first ones.
            points = left[:_POINTS_A_RUN]
            scored, tracked, moved = (any(point.needs == need for point in points) for need in _NEEDS)
            found = processes.strike(
                self._folder / f"processes-{turn}",
                self._seed + turn,
                _FAULTS_A_RUN if turn else len(processes.KINDS),
                points,
                scored=scored or turn % 2 == 0,
                tracked=tracked or turn % 4 == 0,
                moved=moved,
                ranks=1 + turn % 2,
            )
            left = [point for point in left if point.name not in found.points]
            left = left[len(points) - len(found.points) :] + left[: len(points) - len(found.points)]
            self.process_faults += found.faults
            self.points |= found.points
            self.clock_jumps += found.jumps
            for kind, seconds in found.recovery_s.items():
                self.recovery_s[kind] += seconds
            self._note(f"processes, run {turn}: {sum(found.faults.values())} faults", found.findings)
        _harness.tell(f"points not reached: {', '.join(sorted(_names(left))) or 'none'}")

    def repeated(self) -> None:
        """Compare a run whose processes are killed with an undisturbed run."""
        kills, steps = (5, 40) if self._short else (20, 120)
        found, same = processes.repeat(self._folder / "repeated", self._seed, kills, steps=steps)
        self.process_faults += found.faults
        self.comparison = {"kills": found.faults.total(), "steps": steps, "bit_identical": same}
        self._note(f"repeated: {self.comparison}", found.findings)

    def surroundings(self) -> None:
        """Kill Prefect's server, its worker, the flow run and MLflow."""
        for killed in list(stack.KINDS)[: 1 if self._short else None]:
            found = stack.strike(self._folder / f"surroundings-{killed}", killed)
            self.process_faults += found.faults
            self._note(f"surroundings, {killed} killed: {sum(found.faults.values())} faults", found.findings)

    def outages(self) -> None:
        """Interrupt the S3 server of a run."""
        if lack := radosgw.missing():
            _harness.tell(f"outages: skipped: {lack}")
            return
        for turn in range(1 if self._short else 3):
            found = outside.lose_store(self._folder / f"outages-{turn}", self._seed + turn, 6)
            self.process_faults += found.faults
            self._note(f"outages, run {turn}: {found.faults.total()} faults", found.findings)

    def power(self) -> None:
        wanted, turn = (5 if self._short else 50), 0
        while self.power_offs < wanted and turn < wanted:
            losses = min(_LOSSES_A_RUN, wanted - self.power_offs)
            found = outside.lose_power(self._folder / f"power-{turn}", self._seed + turn, losses)
            self.power_offs += found.faults.total()
            self._note(f"power, run {turn}: {found.faults.total()} losses", found.findings)
            turn += 1

    def objects(self) -> None:
        """Test a failing store in this process."""
        for turn in range(30 if self._short else 120):
            found = objects.strike(self._folder / f"objects-{turn}", self._seed + turn)
            self.object_faults += found.faults
            self._note(None, found.findings)
        _harness.tell(f"objects: {dict(self.object_faults)}")

    def messages(self) -> None:
        """Disturb messages between the processes of real runs."""
        for turn in range(1 if self._short else 4):
            found = outside.lose_messages(self._folder / f"messages-{turn}", self._seed + turn)
            self.object_faults += found.faults
            self._note(f"messages, run {turn}: {dict(found.faults)}", found.findings)

    def result(self) -> dict[str, Any]:
        total = totals(self.findings)
        names = {"trainer": "trainer", "controller": "controller", "generation": "server"}
        return {
            "process_faults": sum(self.process_faults.values()),
            "kinds": len({name.split()[0] for name in self.process_faults}),
            "points": len(self.points),
            "points_known": len(POINTS),
            "object_faults": sum(self.object_faults.values()),
            "power_offs": self.power_offs,
            "clock_jumps": self.clock_jumps,
            "repeated": self.comparison,
            "lost": total["lost"] + total["versions"] + total["checkpoints"] + total["tokens"],
            "used_twice": total["used_twice"],
            "staleness_violations": total["staleness"],
            "admitted_stale": total["admitted_stale"],
            "orphans": total["orphans"],
            "unresumable": total["unresumable"],
            "recovery_s": {
                names[kind]: round(statistics.median(seconds), 2) if seconds else None
                for kind, seconds in self.recovery_s.items()
            },
            "recoveries": {names[kind]: len(seconds) for kind, seconds in self.recovery_s.items()},
        }

    def _note(self, what: str | None, findings: Findings) -> None:
        self.findings.append(findings)
        for line in [*([what] if what else []), *(f"  {one}" for one in findings.problems())]:
            _harness.tell(line)


_NEEDS = ("scored", "tracked", "moved")


def _names(points: list[Point]) -> list[str]:
    return [point.name for point in points]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    logging.disable()  # what is skipped and set aside is told by the thousand
    with tempfile.TemporaryDirectory(prefix="areal-chaos-") as folder:
        chaos = Chaos(options.keep or Path(folder), options.seed, short=options.short)
        seconds: dict[str, float] = {}
        for part in options.parts:
            since = time.monotonic()
            getattr(chaos, part)()
            seconds[part] = round(time.monotonic() - since, 1)
        return {**chaos.result(), "seconds": seconds}


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--short", action="store_true", help="run for a few minutes only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=_harness.some_of(PARTS), default=list(PARTS), metavar=",".join(PARTS))
    parser.add_argument("--keep", type=Path, help="new folder to keep the files of the runs in; default: delete them")
    options = parser.parse_args()
    _harness.report(lambda: measure(options))


if __name__ == "__main__":
    main()
