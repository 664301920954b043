"""Nodes of runs under faults: does anything go on costing, or end, that shouldn't, and can every run go on?

    make bench NAME=provisioning ARGS="--scripted 2000 --parts scripted"

**scripted**: the code that makes, leases, replaces, ends and reaps nodes, with a terraform and a cloud by script, and
owners and reapers that are real processes: errors of every kind, answers that are lost, terraform, owner and reaper
killed and stopped, in every phase and several at once; stores that fail; clocks that are off (tests/provisioning). By
seed; which moment a fault meets is the machine's.

**emulated**: whole flows on an emulated cloud, with the real terraform (tests/provisioning/emulated.py); left out where
that can't be had.

After the faults the reaper looks, twice at most. `leaked`: things of a run that nobody has. `wrongly_destroyed`: things
that were ended by another one than the holder of the lease, while there was one, or by one who had it from somebody who
lived. `intruders`: whatever else was changed without the lease. `unfinished_states`: runs that could not go on, states
that say other than there is, leases that were not given back, processes that did not end. docs/cloud.md tells the rest.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import _harness
from tests.emulated_cloud.cloud import missing as no_cloud
from tests.provisioning import campaign, emulated
from tests.support.terraform import missing as no_terraform

PARTS = ("scripted", "emulated")
_NAMED = 30
_MEMORY = Path("/dev/shm")  # where it is there: what is written here need not outlive anything


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--scripted", type=_harness.positive, default=600, metavar="N", help="faults by script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=_harness.some_of(PARTS), default=list(PARTS), metavar=",".join(PARTS))
    scenes = list(emulated.SCENES)
    parser.add_argument("--scenes", type=_harness.some_of(scenes), default=scenes, metavar=",".join(scenes))
    parser.add_argument("--keep", type=Path, help="a new folder for scenes in which something was found")
    options = parser.parse_args()
    _harness.report(lambda: measure(options))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {"faults_real": 0, "faults_scripted": 0, "leaked": 0, "wrongly_destroyed": 0, "unfinished_states": 0}
    result: dict[str, Any] = {**found, "reclaimed_spot_survived": None, "seconds": {}}
    for part in options.parts:
        _harness.tell(part)
        began = time.monotonic()
        for name, value in (_scripted(options) if part == "scripted" else _emulated(options)).items():
            result[name] = result[name] + value if name in found else value
        result["seconds"][part] = round(time.monotonic() - began)
    return result


def _scripted(options: argparse.Namespace) -> dict[str, Any]:
    logging.disable()  # renewals that fail are told by the hundred
    with tempfile.TemporaryDirectory(
        prefix="areal-bench-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None
    ) as own:
        outcomes = campaign.run(options.keep or Path(own), options.scripted, options.seed, _harness.tell)
    logging.disable(logging.NOTSET)
    struck = Counter(one for outcome in outcomes for one in outcome.struck)
    known = {(fault["kind"], f"{fault['actor']} {fault['place']}") for fault in campaign.faults()}
    _harness.tell(f"  by kind: {_counted((kind, count) for (kind, _), count in struck.items())}")
    _harness.tell(f"  by phase: {_counted((place, count) for (_, place), count in struck.items())}")
    _harness.tell(f"  in scenes with: {_counted((one, 1) for outcome in outcomes for one in outcome.settings)}")
    if nowhere := sorted(" ".join(each) for each in known - struck.keys()):
        more = f", and {len(nowhere) - _NAMED} more" if len(nowhere) > _NAMED else ""
        _harness.tell(f"  struck nothing: {', '.join(nowhere[:_NAMED])}{more}")
    findings = [outcome.findings for outcome in outcomes]
    return {
        "faults_scripted": struck.total(),
        "scenes": len(outcomes),
        "faults_known": len(known),
        "faults_struck": len(known & struck.keys()),
        "leaked": sum(len(each.leaked) for each in findings),
        "wrongly_destroyed": sum(len(each.wrongly_destroyed) for each in findings),
        "intruders": sum(len(each.intruders) for each in findings),
        "unfinished_states": sum(len(each.unfinished) + len(each.hung) for each in findings),
    }


def _emulated(options: argparse.Namespace) -> dict[str, Any]:
    if lack := no_terraform() or no_cloud():
        _harness.tell(f"  left out: {lack}")
        return {}
    found = emulated.campaign(options.seed, options.scenes, _harness.tell)
    return {"faults_real": found.pop("emulated_faults"), **found}


def _counted(each: Iterable[tuple[str, int]]) -> str:
    """Sums by name, the largest first."""
    total: Counter[str] = Counter()
    for name, count in each:
        total[name] += count
    return ", ".join(f"{name} {count}" for name, count in total.most_common())


if __name__ == "__main__":
    main()
