"""Do nodes leak, or end wrongly, under faults, and can every run continue?

    make bench NAME=provisioning ARGS="--faults 2000"

The code that creates, leases, replaces, destroys and reaps nodes runs against a store, a cloud, a Terraform and a clock
in memory (tests/provisioning/model.py). Faults are errors of every kind, lost responses, failing stores and wrong
clocks. Terraform, owners and reapers are killed at every call, or stopped while others act. The seed decides all.

After the faults the reaper runs at most twice. `leaked`: resources of a run without an owner. `wrongly_destroyed`:
resources destroyed by another process while the lease had a holder. `intruders`: other changes without the lease, and
leases taken from a living holder. `unfinished_states`: runs that could not continue, and leases that were not given
back. docs/cloud.md has the details.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import _harness
from tests.provisioning import campaign

_NAMED = 30


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--faults", type=_harness.positive, default=5000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    _harness.report(lambda: measure(options))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    logging.disable()  # renewals that fail are told by the hundred
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as own:
        outcomes = campaign.run(Path(own), options.faults, options.seed, _harness.tell)
    logging.disable(logging.NOTSET)
    struck = Counter(one for outcome in outcomes for one in outcome.struck)
    known = {fault.what for fault in campaign.faults()}
    _harness.tell(f"  faults by kind: {_counted((kind, count) for (kind, _), count in struck.items())}")
    _harness.tell(f"  faults by phase: {_counted((place, count) for (_, place), count in struck.items())}")
    if nowhere := sorted(" ".join(each) for each in known - struck.keys()):
        more = f", and {len(nowhere) - _NAMED} more" if len(nowhere) > _NAMED else ""
        _harness.tell(f"  points without a fault: {', '.join(nowhere[:_NAMED])}{more}")
    findings = [outcome.findings for outcome in outcomes]
    return {
        "faults_scripted": struck.total(),
        "scenes": len(outcomes),
        "faults_known": len(known),
        "faults_struck": len(known & struck.keys()),
        "leaked": sum(len(each.leaked) for each in findings),
        "wrongly_destroyed": sum(len(each.wrongly_destroyed) for each in findings),
        "intruders": sum(len(each.intruders) for each in findings),
        "unfinished_states": sum(len(each.unfinished) for each in findings),
    }


def _counted(each: Iterable[tuple[str, int]]) -> str:
    """Sums by name, the largest first."""
    total: Counter[str] = Counter()
    for name, count in each:
        total[name] += count
    return ", ".join(f"{name} {count}" for name, count in total.most_common())


if __name__ == "__main__":
    main()
