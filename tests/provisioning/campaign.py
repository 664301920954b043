"""Owners and reapers of one run as real processes, under faults; then what is left, and who did what.

A scene has an owner, who makes the nodes, replaces one and ends them; who may die, and come back on the same machine or
on another one; perhaps a rival, who wants the same at the same time; perhaps reapers, who look all the time. Leases
last seconds here, clocks are off within the margin. After the faults time passes, the run is made once more or left
alone, the reaper looks twice at most, and the ledger is read (checker.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.errors import ArealError
from flows.provision import leased
from tests.provisioning.checker import Findings, check
from tests.provisioning.world import RUN, World

LENGTH_S, MARGIN_S = 1.8, 0.6  # of leases, in real seconds
_SKEW_S = 0.25  # at most, each way: two clocks differ by less than the margin
_LIVES = 3  # of an owner
_DEADLINE_S = 60.0  # for all of a scene; it takes a few
_MOST = 5  # faults of one scene
# What nobody comes to unless this was before.
_BEFORE = {
    "push:start": {"place": "destroy:write", "kind": "unwritable"},
    "force-unlock": {"place": "destroy:middle", "kind": "kill"},
    "cloud:end": {"actor": "flow", "place": "apply:unanswered", "kind": "kill both", "nth": 4},
}
_TRIES = 4  # of a fault that nobody comes to, before it is left to the next turn
_TOLD = 50  # scenes between two lines
_PAUSE_S = 0.02  # between two tries, and two looks

_ERRORS = ("throttling", "unavailable")
_DEATHS = ("kill", "kill owner", "kill both")
_PLACES = {
    "init": ("unavailable", *_DEATHS),
    **{f"{kind}:locked": (*_ERRORS, *_DEATHS, "slow", "stop owner", "stall") for kind in ("plan", "destroy-plan")},
    **{f"{kind}:end": ("unavailable", *_DEATHS, "stop owner") for kind in ("plan", "destroy-plan")},
    **{f"{kind}:unlock": ("unlock fails",) for kind in ("plan", "destroy-plan", "apply", "destroy")},
    "apply:start": ("quota", "capacity", *_ERRORS, *_DEATHS, "slow", "stop owner"),
    "apply:middle": ("quota", "capacity", *_ERRORS, *_DEATHS, "slow", "stop owner", "stall"),
    "apply:unanswered": ("unavailable", "kill", "kill both"),
    "apply:end": ("kill", "kill owner", "kill both", "stop owner"),
    "apply:write": ("unwritable",),
    "apply:stored": ("unavailable", *_DEATHS),
    "destroy:start": (*_ERRORS, *_DEATHS, "slow", "stop owner"),
    "destroy:middle": (*_ERRORS, *_DEATHS, "slow", "stop owner", "stall"),
    "destroy:unanswered": ("unavailable", "kill", "kill both"),
    "destroy:end": ("kill", "kill owner", "kill both", "stop owner"),
    "destroy:write": ("unwritable",),
    "destroy:stored": ("unavailable", *_DEATHS),
    "pull": ("unavailable", "kill", "kill owner"),
    "output": ("unavailable", "kill", "kill owner"),
    "push:start": ("unavailable", "kill both"),
    "force-unlock": ("unavailable", "kill", "kill both"),
    **{
        f"store:{side}-{what}": ("kill", "store error", "slow", "stop owner")
        for side in ("before", "after")
        for what in ("acquire", "renewal", "release")
    },
    "store:read": ("kill", "store error"),
    "cloud:found": ("throttling", "unavailable", "kill", "slow"),
    "cloud:end": ("throttling", "unavailable", "kill", "stop owner"),
}
_REAPERS = {
    place: kinds
    for place, kinds in _PLACES.items()
    if place.startswith(("store:", "cloud:")) and not place.endswith("-acquire")
}
_OFTEN = {"apply:middle": 5, "apply:unanswered": 6, "destroy:middle": 5, "destroy:unanswered": 6}  # a command
_SEVERAL = {
    "store:before-renewal": 12,
    "store:after-renewal": 12,
    "pull": 6,
    "cloud:found": 4,
    "cloud:end": 3,
}  # a scene


@dataclass(slots=True)
class Outcome:
    """What was done in one scene, and what came of it."""

    struck: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # kind and place
    settings: list[str] = field(default_factory=list[str])  # what the whole scene had to live with
    missed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # faults whose place nobody came to
    findings: Findings = field(default_factory=Findings)


def faults() -> list[dict[str, Any]]:
    """All that there are: who is struck, where, by what."""
    return [
        {"actor": actor, "place": place, "kind": kind}
        for actor, places in (("flow", _PLACES), ("reaper", _REAPERS))
        for place, kinds in places.items()
        for kind in kinds
    ]


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays."""

    lives: int = 1  # of the owner
    leaves: bool = False  # he does not end the nodes
    rival: bool = False
    reapers: int = 0
    stopped_s: float | None = None  # for how long who is stopped is; None: by chance, up to twice a lease

    @classmethod
    def chosen(cls, rng: random.Random, *, needs_reaper: bool) -> Cast:
        return cls(
            lives=rng.choice((1, 2, 2, _LIVES)),
            leaves=needs_reaper or rng.random() < 0.3,
            rival=rng.random() < 0.2,
            reapers=rng.choice((1, 2)) if needs_reaper else rng.choice((0, 0, 1, 2)),
        )


def play(folder: Path, seed: int, planned: list[dict[str, Any]], cast: Cast | None = None) -> Outcome:
    """One scene, in a new folder, whose run is made again in the end where `seed` is even."""
    rng = random.Random(seed)
    world = World(folder, length_s=LENGTH_S, margin_s=MARGIN_S)
    drawn = {"stall_s": 2 * LENGTH_S + MARGIN_S}
    world.plan(
        drawn
        | {
            "nth": rng.randrange(_OFTEN.get(fault["place"], _SEVERAL.get(fault["place"], 1))),
            "seconds": rng.uniform(0.1, 0.6),
        }
        | fault
        for fault in planned
    )
    cast = cast or Cast.chosen(rng, needs_reaper=any(fault["actor"] == "reaper" for fault in planned))
    with _Scene(world, rng, cast) as scene:
        scene.run()
    struck = world.struck()
    outcome = Outcome([(fault["kind"], f"{fault['actor']} {fault['place']}") for fault in struck])
    also = {"two owners": cast.rival, "two reapers": cast.reapers > 1, "clocks off": scene.skewed}
    outcome.settings = [kind for kind, there in also.items() if there]
    came = {fault["id"] for fault in struck}
    outcome.missed = [fault for number, fault in enumerate(planned) if number not in came]
    world.plan([])
    outcome.findings = check(world, scene.hung, again=seed % 2 == 0)
    return outcome


# ---- those who play ----


def _own(world: World, machine: str, leaves: bool) -> None:
    """A flow: what fails for good it gives up, what is lost it leaves alone."""
    rng = random.Random(os.getpid())
    with world.nodes(machine, patience_s=0.0 if machine == "rival" else LENGTH_S + MARGIN_S + 1.0) as nodes:
        hosts = nodes.make()
        time.sleep(rng.uniform(0.0, 0.5))
        nodes.check()
        if rng.random() < 0.5:
            nodes.replace([rng.choice(hosts).name])
        if not leaves:
            nodes.end()
        elif rng.random() < 0.3:
            nodes.hand_over()


def _reap(world: World, machine: str, leaves: bool) -> None:
    over = world.folder / "over"
    while not over.exists():
        with contextlib.suppress(ArealError):  # the store is away for a moment
            world.reaper(machine, print).reap()
        time.sleep(0.1)


class _Scene:
    """The processes of a scene, as a context; none outlives it."""

    def __init__(self, world: World, rng: random.Random, cast: Cast) -> None:
        self._world, self._rng, self._cast = world, rng, cast
        self._alive: dict[int, tuple[str, str, Callable[..., None]]] = {}
        self._stopped: dict[int, float] = {}  # until when
        self.skewed = False
        self.hung: list[str] = []

    def __enter__(self) -> _Scene:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def start(self, actor: str, machine: str, part: Callable[..., None]) -> int:
        skew_s = self._rng.choice((0.0, self._rng.uniform(-_SKEW_S, _SKEW_S)))
        self.skewed |= skew_s != 0.0
        pid = os.fork()
        if pid == 0:
            _play(self._world, actor, skew_s, lambda: part(self._world, machine, self._cast.leaves))
        self._alive[pid] = (actor, machine, part)
        return pid

    def run(self) -> None:
        """Until no owner is left, and reapers have had their time."""
        deadline = time.monotonic() + _DEADLINE_S
        if self._cast.rival:
            self.start("flow-rival", "rival", _own)
        for number in range(self._cast.reapers):
            self.start(f"reaper-{number}", f"reaper-{number}", _reap)
        owner = self.start("flow-0", "a", _own)
        lived = 1
        while time.monotonic() < deadline:
            for pid in self._look():
                actor, machine, part = self._alive.pop(pid)
                if actor.startswith("reaper"):  # the next one of its schedule
                    self.start(actor, machine, part)
                elif pid == owner and lived < self._cast.lives:
                    machine = self._rng.choice(("a", "b"))
                    owner = self.start(f"flow-{lived}", machine, _own)
                    lived += 1
            owners = [actor for actor, _, _ in self._alive.values() if actor.startswith("flow")]
            if not owners:
                self._until_reaped()
                break
            time.sleep(_PAUSE_S)
        (self._world.folder / "over").touch()
        while self._alive and time.monotonic() < deadline:
            for pid in self._look():
                del self._alive[pid]
            time.sleep(_PAUSE_S)
        self.hung = [actor for actor, _, _ in self._alive.values()]

    def _until_reaped(self) -> None:
        """Reapers have time to get at what the last owner has left."""
        if not any(actor.startswith("reaper") for actor, _, _ in self._alive.values()):
            return
        until = time.monotonic() + LENGTH_S + MARGIN_S + 1.5
        while time.monotonic() < until and self._world.living():
            for pid in self._look():
                actor, machine, part = self._alive.pop(pid)
                self.start(actor, machine, part)
            time.sleep(_PAUSE_S)

    def _look(self) -> Iterator[int]:
        """Those that have ended. Those that were stopped go on after a while."""
        for pid in list(self._alive):
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                self._stopped[pid] = time.monotonic() + (self._cast.stopped_s or self._rng.uniform(0.2, 2.0 * LENGTH_S))
            elif ended:
                self._stopped.pop(pid, None)
                yield pid
            elif time.monotonic() > self._stopped.get(pid, float("inf")):
                del self._stopped[pid]
                os.kill(pid, signal.SIGCONT)


def _play(world: World, actor: str, skew_s: float, part: Callable[[], None]) -> None:
    """In a new process, which ends here."""
    status = 1
    try:
        os.environ.update(world.environment(actor, skew_s))
        log = (world.folder / f"{actor}.log").open("a", buffering=1)
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 2)
        leased._PAUSE_S = _PAUSE_S  # pyright: ignore[reportPrivateUsage]
        part()
        status = 0
    except ArealError as error:
        print(f"{time.time():.2f} {actor}: {type(error).__name__}: {error}")
        status = 3
    except BaseException:  # noqa: BLE001 - it is told, and found in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


# ---- all scenes ----


class Schedule:
    """Which faults strike in which scene: all by turns, one to five at once; what nobody came to is tried again."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._order: list[dict[str, Any]] = []
        self._scenes = 0
        self._tries: Counter[str] = Counter()

    def next(self) -> list[dict[str, Any]]:
        number = 1 + self._scenes % _MOST
        self._scenes += 1
        if len(self._order) < _MOST:
            again = faults()
            self._rng.shuffle(again)
            self._order += again
        first = self._order[0]
        chosen = [fault for fault in self._order if _go_together(first, fault)][:number]
        self._order = [fault for fault in self._order if fault not in chosen]
        before = [_BEFORE[fault["place"]] for fault in chosen if fault["place"] in _BEFORE]
        return chosen + [{"actor": chosen[0]["actor"]} | fault for fault in before]

    def missed(self, planned: list[dict[str, Any]]) -> None:
        """In other scenes, at other moments, somebody may come to these."""
        for fault in planned:
            name = f"{fault['actor']} {fault['place']} {fault['kind']}"
            self._tries[name] += 1
            if self._tries[name] % _TRIES:
                self._order.append(fault)


def _go_together(first: dict[str, Any], fault: dict[str, Any]) -> bool:
    """Where a reaper is to be struck, an owner leaves him something to do."""
    if first["actor"] == "reaper":
        return fault["actor"] == "reaper" or not fault["place"].startswith(("destroy", "cloud:end", "store:after-rel"))
    return fault["actor"] == "flow"


def run(folder: Path, wanted: int, seed: int, tell: Callable[[str], None], *, at_once: int = 5) -> list[Outcome]:
    """Scenes, until there were as many faults as are wanted. This process must have no other threads."""
    schedule, outcomes = Schedule(seed), list[Outcome]()
    struck = number = 0
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("fork")) as pool:
        playing: dict[Future[Outcome], Path] = {}
        while struck < wanted or playing:
            while struck < wanted and len(playing) < at_once:
                scene = folder / f"scene-{number}"
                playing[pool.submit(play, scene, seed * 1_000_000 + number, schedule.next())] = scene
                number += 1
            for ended in concurrent.futures.wait(playing, return_when=FIRST_COMPLETED).done:
                scene, outcome = playing.pop(ended), ended.result()
                outcomes.append(outcome)
                schedule.missed(outcome.missed)
                struck += len(outcome.struck)
                for line in outcome.findings.problems():
                    tell(f"  {line}")
                if not outcome.findings.problems():
                    shutil.rmtree(scene)
                if len(outcomes) % _TOLD == 0:
                    tell(f"  {len(outcomes)} scenes, {struck} faults")
    return outcomes


__all__ = ["RUN", "Cast", "Outcome", "faults", "play", "run"]
