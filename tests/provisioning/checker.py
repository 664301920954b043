"""What is left after a scene, and who did what in it.

The ledger has every thing that was made and ended, by which holder, and what the lease said at that moment. From it and
from what there is follows whether the promises hold; nothing here asks the code that gave them.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

from areal_core.errors import ArealError
from areal_core.launch.supervisor import FileLock
from flows.provision import leased
from tests.provisioning.world import RUN, World


@dataclass(slots=True)
class Findings:
    """What does not hold, in lines."""

    leaked: list[str] = field(default_factory=list[str])  # what costs, or is in the way, and is nobody's
    wrongly_destroyed: list[str] = field(default_factory=list[str])  # ended by others than the one with the lease
    intruders: list[str] = field(default_factory=list[str])  # changed something without the lease, or after its end
    unfinished: list[str] = field(default_factory=list[str])  # runs that can't go on, or states that are wrong
    hung: list[str] = field(default_factory=list[str])  # processes that had to be killed

    def problems(self) -> list[str]:
        return [f"{found.name}: {line}" for found in fields(self) for line in getattr(self, found.name)]


def check(world: World, hung: list[str], *, again: bool) -> Findings:
    """Time passes, the run is made `again` or left alone, the reaper looks; then all is counted."""
    findings = Findings(hung=[f"{world.folder}: {actor} did not end" for actor in hung])
    _wait_for_programs(world)
    _check_entries(world, findings)
    with (
        mock.patch.dict(os.environ, world.environment("settling")),
        mock.patch.object(leased, "_PAUSE_S", 0.02),
    ):
        if again:
            world.forward(world.length_s + world.margin_s + 1.0)
            _make_again(world, findings)
        for _ in range(2):
            world.forward(world.length_s + world.margin_s + 1.0)
            if not (reaped := world.reaper("settling").reap()):
                break
            findings.unfinished += [f"{world.folder}: the reaper: {one}" for one in reaped if one.failed]
    findings.leaked += [f"{world.folder}: {each['kind']} {id_} {each['name']}" for id_, each in world.living().items()]
    findings.unfinished += [f"{world.folder}: {line}" for line in _left_behind(world)]
    return findings


def _wait_for_programs(world: World) -> None:
    """What terraforms of the dead are at ends with the leases, by a clock that can't be set forward."""
    deadline = time.monotonic() + 2 * world.length_s
    while any(FileLock.is_held(lock) for lock in world.folder.glob(f"*/*/{RUN}/lock")):
        assert time.monotonic() < deadline, "a terraform outlives its lease"
        time.sleep(0.02)


def _make_again(world: World, findings: Findings) -> None:
    """The next owner of the same run finds everything as it should be."""
    try:
        with world.nodes("settling", length_s=600.0) as nodes:
            hosts = nodes.make()
            there = world.living(RUN)
            instances = sorted(id_ for id_, each in there.items() if each["kind"] == "aws_instance")
            if sorted(host.name for host in hosts) != ["generation-0", "generation-1", "trainer-0"]:
                findings.unfinished.append(f"{world.folder}: made again there are {[host.name for host in hosts]}")
            if sorted(host.id for host in hosts) != instances or len(there) != len(hosts) + 3:
                findings.unfinished.append(f"{world.folder}: made again there are {sorted(there)}, hosts {hosts}")
            nodes.end()
    except ArealError as error:
        findings.unfinished.append(f"{world.folder}: could not be made again: {error}")


def _left_behind(world: World) -> list[str]:
    """Of a run that has ended: no lease, and a state that holds nothing that is there."""
    store = world.folder / "store" / "terraform"
    lease, state = store / "leases" / f"{RUN}.json", store / "runs" / f"{RUN}.tfstate"
    left: list[str] = []
    if lease.exists() and lease.read_bytes():
        left.append(f"the lease was not given back: {lease.read_text()}")
    there = json.loads(state.read_text())["resources"] if state.exists() else {}
    living = world.living()
    left += [f"the state holds {address}" for address, each in there.items() if each["id"] in living]
    return left


def _check_entries(world: World, findings: Findings) -> None:
    """Whatever was done was done by the one with the lease, while it was his, and he had it from nobody who lived."""
    lease: dict[str, Any] | None = None  # the last one
    former: set[str] = set()  # holders who have it no more
    stolen: set[str] = set()  # holders who have it from somebody who had it
    for entry in world.entries():
        if entry["op"] == "lease":
            if lease is not None and (entry["lease"] is None or entry["lease"]["holder"] != lease["holder"]):
                former.add(lease["holder"])
            if entry["lease"] is not None and entry["lease"]["holder"] in former:
                findings.intruders.append(f"{world.folder}: {entry['actor']} wrote a lease that was no longer his")
            if (line := _stolen(lease, entry)) is not None:
                findings.intruders.append(f"{world.folder}: {line}")
                stolen.add(entry["lease"]["holder"])
            lease = entry["lease"] and {**entry["lease"], "pid": entry["pid"], "actor": entry["actor"]}
        elif (line := _wrong(entry, world.margin_s)) is not None:
            findings.intruders.append(f"{world.folder}: {line}")
            if entry["op"] == "end" and _is_live(entry):
                findings.wrongly_destroyed.append(f"{world.folder}: {line}")
        elif entry["op"] == "end" and entry["holder"] in stolen:
            findings.wrongly_destroyed.append(
                f"{world.folder}: {entry['actor']} end {entry['name']}, which had an owner"
            )


def _stolen(before: dict[str, Any] | None, entry: dict[str, Any]) -> str | None:
    """Whether a lease was taken from a holder whose it still was, unless he is dead, and was in the same place."""
    lease = entry["lease"]
    if before is None or lease is None or lease["holder"] == before["holder"]:
        return None
    until = max(before["held_until"] or 0.0, before["kept_until"] or 0.0 if lease["by"] == "reaper" else 0.0)
    if entry["at"] > until or (before["where"] == lease["where"] and not entry["before_lives"]):
        return None
    return f"{entry['actor']} took the lease of {before['actor']} {until - entry['at']:.2f} s before its end"


def _wrong(entry: dict[str, Any], margin_s: float) -> str | None:
    lease, what = entry["lease"], f"{entry['actor']} {entry['op']} {entry['name']}"
    if lease is None:
        return f"{what} without a lease"
    if lease["holder"] != entry["holder"]:
        return f"{what} under the lease of a {lease['by']}"
    if lease["held_until"] is None or entry["at"] > lease["held_until"] + margin_s:
        return f"{what} after the end of the lease"
    return None


def _is_live(entry: dict[str, Any]) -> bool:
    lease = entry["lease"]
    return lease is not None and lease["held_until"] is not None and entry["at"] <= lease["held_until"]
