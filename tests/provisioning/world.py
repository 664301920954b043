"""One world: a store, a cloud that is a ledger, a terraform by script, a clock, and those who work in it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_core.errors import ProvisionError, StorageError
from areal_core.storage.objects import Storage
from flows.provision import terraform
from flows.provision.leased import LeasedNodes
from flows.provision.leases import Claimant, Clock, Held, Leases
from flows.provision.nodes import Cloud, Found
from flows.provision.reaper import Reaper
from tests.provisioning import faults, ledger

_CODE = Path(__file__).parent
RUN = "cpu-async-0123456789ab"
FOUNDATION = {"bucket": "areal", "region": "us-east-1", "vpc_id": "vpc-1"}


class World:
    """A folder that holds all of it. Processes of one world share it."""

    def __init__(self, folder: Path, *, length_s: float = 30.0, margin_s: float = 5.0) -> None:
        """`length_s` of leases; `margin_s` by which clocks may differ."""
        self.folder, self.length_s, self.margin_s = folder, length_s, margin_s
        self.program = folder / "terraform"
        if not folder.exists():
            (folder / faults.STRUCK).mkdir(parents=True)
            ledger.begin(str(folder))
            body = f"import runpy\nrunpy.run_path({str(_CODE / 'program.py')!r}, run_name='__main__')\n"
            self.program.write_text(f"#!{sys.executable} -IS\n{body}")
            self.program.chmod(0o755)
            self.plan([])

    def environment(self, actor: str, skew_s: float = 0.0) -> dict[str, str]:
        """Of a process that works in it."""
        return {
            terraform.BINARY: str(self.program),
            "AREAL_SCRIPTED": str(self.folder),
            "AREAL_SCRIPTED_CODE": str(_CODE),
            "AREAL_SCRIPTED_ACTOR": actor,
            "AREAL_SCRIPTED_SKEW": str(skew_s),
            "AREAL_SCRIPTED_OWNER": str(os.getpid()),
            "AREAL_SCRIPTED_HOLDERS": "{}",
        }

    def plan(self, planned: Iterable[Mapping[str, Any]]) -> None:
        """These faults are to strike, beside no others."""
        each = [{"nth": 0, "actor": "", **fault, "id": number} for number, fault in enumerate(planned)]
        ledger.put(str(self.folder / faults.PLAN), json.dumps(each).encode())

    def clock(self) -> Clock:
        """Of this process, which may be off."""
        world, skew = str(self.folder), float(os.environ.get("AREAL_SCRIPTED_SKEW", "0"))
        return Clock(
            wall=lambda: ledger.wall(world, skew),
            passed=lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + ledger.offset(world),
        )

    def forward(self, seconds: float) -> None:
        ledger.forward(str(self.folder), seconds)

    def leases(self) -> Leases:
        storage: Any = FaultyStorage(Storage.open(str(self.folder / "store"), patience_s=0.0), str(self.folder))
        return _NotedLeases(storage, margin_s=self.margin_s, clock=self.clock())

    def cloud(self) -> Cloud:
        return ScriptedCloud(str(self.folder))

    def request(self, run: str = RUN, **changes: Any) -> dict[str, Any]:
        return {
            "run": run,
            "nodes": {"generation": {"count": 2, "spot": True}, "trainer": {"count": 1}},
            "lease": {"owner": "somebody@example.org", "expires_at": "2037-01-31T12:00:00Z"},
            "foundation": FOUNDATION,
            "prefect": {"api_url": "http://10.64.0.10:4200/api", "work_pool": "areal-nodes"},
            **changes,
        }

    def nodes(self, machine: str, run: str = RUN, **options: Any) -> LeasedNodes:
        """Of a process on a machine."""
        options = {"length_s": self.length_s, "leases": self.leases(), "cloud": self.cloud(), "log": _quiet, **options}
        return LeasedNodes(options.pop("request", self.request(run)), self.folder / machine, **options)

    def reaper(self, machine: str, log: Callable[[str], None] = lambda line: None, *, young_s: float = 0.0) -> Reaper:
        return Reaper(
            self.leases(),
            self.folder / machine,
            cloud_of=lambda _: self.cloud(),
            foundation=FOUNDATION,
            length_s=self.length_s,
            young_s=young_s,
            log=log,
        )

    def living(self, run: str | None = None) -> dict[str, dict[str, Any]]:
        """What there is, by its id."""
        there = ledger.living(str(self.folder))
        return {id_: each for id_, each in there.items() if run is None or each["run"] == run}

    def entries(self) -> list[dict[str, Any]]:
        return ledger.entries(str(self.folder))

    def struck(self) -> list[dict[str, Any]]:
        return faults.struck(str(self.folder))


class ScriptedCloud:
    """The ledger, as `flows.provision.nodes.Cloud`."""

    def __init__(self, world: str) -> None:
        self._world = world

    def found(self, run: str | None = None) -> list[Found]:
        faults.strike(self._world, "cloud:found", fail=_fail)
        return [
            Found(
                kind=each["kind"],
                id=id_,
                run=each["run"],
                role=each["role"],
                since=each["at"] if each["kind"] == "aws_instance" else None,
                near=True,
            )
            for id_, each in ledger.living(self._world).items()
            if run is None or each["run"] == run
        ]

    def end(self, found: Iterable[Found], confirm: Callable[[], None]) -> None:
        for each in found:
            faults.strike(self._world, "cloud:end", fail=_fail)
            confirm()
            ledger.end(self._world, each.run, each.id)


class FaultyStorage:
    """A store that fails where it is told to."""

    def __init__(self, storage: Storage, world: str) -> None:
        self._storage, self._world = storage, world
        self.url = storage.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def put_over(self, name: str, data: bytes, mark: str | None) -> str:
        what = "release" if not data else "acquire" if b'"beat":1,' in data else "renewal"
        self._strike(f"store:before-{what}")
        put = ledger.write_lease(
            self._world,
            Path(name).stem,
            json.loads(data) if data else None,
            lambda: self._storage.put_over(name, data, mark),
        )
        self._strike(f"store:after-{what}")
        return put

    def get_marked(self, name: str) -> tuple[bytes, str]:
        self._strike("store:read")
        return self._storage.get_marked(name)

    def _strike(self, place: str) -> None:
        if "store error" in faults.strike(self._world, place):
            raise StorageError(f"storage.url: {place}: no response in time")


class _NotedLeases(Leases):
    """Whoever has the lease says so to the ledger, by his environment, which his terraform inherits."""

    def acquire(self, run: str, claimant: Claimant, *arguments: Any, **options: Any) -> Held:
        held = super().acquire(run, claimant, *arguments, **options)
        holders = json.loads(os.environ["AREAL_SCRIPTED_HOLDERS"]) | {run: claimant.holder}
        os.environ["AREAL_SCRIPTED_HOLDERS"] = json.dumps(holders)
        return held


def _fail(summary: str, detail: str) -> None:
    raise ProvisionError(f"aws: {detail}")


def _quiet(line: str) -> None:
    pass
