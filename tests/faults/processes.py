"""Faults of processes: a run whose processes are killed and stopped at random and at named points, to its end."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from areal_core.api.access import authorization
from areal_core.config.schema import RunConfig
from tests.faults.checker import Outcome, check
from tests.faults.disk import Clock, compiler
from tests.faults.history import History
from tests.faults.points import PROCESSES, REWARD, Point, environment
from tests.support.processes import command_line
from tests.support.runs import Launched, changed, learning

KINDS = ("trainer", "rank", "controller", "generation", "reward", "evaluator", "evaluation", "tracker", "launcher")
_REPEATED = ("trainer", "controller", "generation", "reward", "launcher")
TIMED = ("trainer", "controller", "generation")  # kinds whose recovery is timed
ENDLESS = 100_000  # steps of a run that is ended by other means
_RUN = "r"
_TICK_S = 0.05
_START_S = 90.0  # for a run to be under way
_RECOVERY_S = 90.0  # for a process to be back
_GONE_S = 30.0  # for what a launcher has started to be gone after it
_END_S = 180.0  # for a run to end once it may
_SETTLE_S = 15.0  # for the last points to be met
_LAUNCHES = 60  # of one run, at most
_MORE_STEPS = 3  # that a run makes once the faults are over
_PAUSE_S = (0.3, 1.5)  # that a stopped process is left so
_JUMPS_S = (-30 * 86400.0, -3600.0, -1.0, 1.0, 60.0, 3600.0, 30 * 86400.0)  # by which the wall clock is wrong
_QUICK = {"restarts": 1000, "stop_timeout_s": 3.0}  # settings of a launcher that is struck


@dataclass(slots=True)
class Struck(Outcome):
    """A run whose processes were struck."""

    jumps: int = 0  # of the wall clock
    points: set[str] = field(default_factory=set[str])  # that were struck
    recovery_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class Target:
    """A run under faults, across its launchers."""

    def __init__(self, folder: Path, seed: int, config: RunConfig, points: Sequence[Point] = ()) -> None:
        """A run whose state is below the new `folder`, and which is struck at `points`, whenever they are reached."""
        self.chance, self.seed, self.result = random.Random(seed), seed, Struck()
        self.config = config
        state, self._markers = Path(config.state_dir), folder / "markers"
        self._markers.mkdir(parents=True)
        self.store = state / "store" / "runs" / _RUN
        self.history = History(state / "runs" / _RUN / "ledger.sqlite")
        self.missed = {point.name: point for point in points}  # those that were not reached
        self._clock = Clock(folder / "clock") if compiler() else None
        faults = [point.fault(self._markers) for point in points]
        self._environment = environment(faults, os.environ.get("PYTHONPATH", ""))
        self._environment |= self._clock.environment() if self._clock else {}
        self._recoveries: dict[str, tuple[float, Callable[[], bool]]] = {}  # kind -> since when, whether it is over
        self._stopped: dict[int, float] = {}  # pid -> when it goes on
        self.launches = 0
        self.moved = False
        self.run = self._launch()

    def _launch(self) -> Launched:
        self.launches += 1
        with patch.dict(os.environ, self._environment):
            return Launched(self.config, _RUN)

    def resume(self, *, move: bool = False, **groups: dict[str, Any]) -> None:
        """Launch the run again, with fields of its configuration changed, once nothing is left of the launcher before.
        `move`: on another machine, where its folder is not."""
        self.run.launcher.wait(_GONE_S)
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        self.leave(_GONE_S)
        self._stopped.clear()
        self._recoveries.clear()
        if move:
            self.moved = True
            manifests = self.store.glob("checkpoints/step-*/manifest.json")
            steps = [int(file.parent.name[5:].partition(".")[0]) for file in manifests]
            shutil.rmtree(self.run.run.root)
            self.history.moved(max(steps, default=0))
        self.config = changed(self.config.to_dict(), **groups)
        self.run = self._launch()

    def leave(self, within_s: float = 0.0) -> None:
        """The end of a launcher, of which nothing may be left then."""
        deadline = time.monotonic() + within_s
        while (left := self.run.processes()) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        self.result.findings["orphans"] += [command_line(pid) for pid in left]
        self.result.output += self.run.output()
        self.close()

    def close(self) -> None:
        """Kill what is left."""
        self.run.__exit__()

    # -- what is seen ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at everything: the ledger, points that were struck, processes that go on or are back."""
        time.sleep(_TICK_S)
        self.history.look()
        for name in [name for name in self.missed if (self._markers / name).exists()]:
            self.result.points.add(name)
            pid = int((self._markers / name).read_text() or 0)
            self._note(PROCESSES[self.missed.pop(name).process], "SIGKILL", pid)
        for pid in [pid for pid, when in self._stopped.items() if time.monotonic() >= when]:
            _signal(pid, signal.SIGCONT)
            del self._stopped[pid]
        for kind in [kind for kind, (_, over) in self._recoveries.items() if over()]:
            since, _ = self._recoveries.pop(kind)
            self.result.recovery_s.setdefault(kind, []).append(time.monotonic() - since)

    @property
    def recovering(self) -> bool:
        return bool(self._recoveries or self._stopped)

    @property
    def over(self) -> bool:
        """The launcher has ended."""
        return self.run.launcher.poll() is not None

    def working(self) -> bool:
        """All processes of the run are ready, and steps are made."""
        roles = ["controller", "trainer", "generation"]
        roles += ["evaluator", "evaluation"] if self.config.evaluation.enabled else []
        return all(self.run.run.ready_file(role).exists() for role in roles) and self._trained() > 0

    def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Watch until `condition` holds; False where the launcher has ended before, or it took too long."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.over:
            self.tick()
            if condition():
                return True
        return False

    # -- faults ----------------------------------------------------------------------------------------------------

    def strike(self, kind: str, signum: signal.Signals) -> bool:
        """Send a signal to a process of a kind; False where there is none now."""
        pid = self._pid(kind)
        if pid is None or (pid in self._stopped and signum is signal.SIGSTOP) or not _signal(pid, signum):
            return False
        if signum is signal.SIGSTOP:
            self._stopped[pid] = time.monotonic() + self.chance.uniform(*_PAUSE_S)
        self._note(kind, signum.name, pid)
        return True

    def jump(self) -> None:
        """The wall clock of all processes is wrong from now on, by another amount."""
        if self._clock is not None:
            self._clock.jump(self.chance.choice(_JUMPS_S))
            self.result.jumps += 1

    def _note(self, kind: str, signum: str, pid: int) -> None:
        self.result.faults[f"{kind} {signum}"] += 1
        before, trained = pid if signum == "SIGKILL" else 0, self._trained()
        over: dict[str, Callable[[], bool]] = {
            "trainer": lambda: self._trained() > trained,
            "controller": lambda: self._pid(kind) not in (None, before) and self._ask("/status") is not None,
            "generation": lambda: self._pid(kind) not in (None, before) and self._serves(),
        }
        if kind in over:
            self._recoveries.setdefault(kind, (time.monotonic(), over[kind]))

    def _pid(self, kind: str) -> int | None:
        """A process of a kind that is alive."""
        if kind == "launcher":
            return None if self.over else self.run.launcher.pid
        try:
            if kind == "reward":
                children = self.run.children(self.run.last_pid("controller"))
                workers = [pid for pid in children if re.search(REWARD, command_line(pid))]
                return self.chance.choice(workers) if workers else None
            pid = self.run.last_pid("trainer", 1) if kind == "rank" else self.run.last_pid(kind)
            return pid if str(self.run.run.root) in command_line(pid) else None
        except (OSError, ValueError):
            return None

    def _trained(self) -> int:
        """Steps that were trained, replayed ones too."""
        file = self.run.run.timeline_file("trainer")
        return file.read_bytes().count(b'["train"') if file.exists() else 0

    def _serves(self) -> bool:
        """The generation server that was ready last takes work."""
        servers = {one["url"]: one["state"] for one in self._ask("/servers") or ()}
        with suppress(OSError, ValueError):
            return servers.get(self.run.url("generation")) == "serving"
        return False

    def _ask(self, path: str) -> Any:
        """What the controller answers; None where it does not within a second."""
        with suppress(OSError, ValueError):
            headers = authorization(self.run.run.token())
            request = urllib.request.Request(self.run.url("controller") + path, headers=headers)
            with urllib.request.urlopen(request, timeout=1.0) as response:
                return json.load(response)
        return None


def strike(
    folder: Path,
    seed: int,
    faults: int,
    points: Sequence[Point] = (),
    *,
    scored: bool = True,
    tracked: bool = True,
    moved: bool = False,
    ranks: int = 1,
) -> Struck:
    """Run in the new `folder`, with this many ranks, an evaluator with a server where it is `scored`, and a tracker
    where it is `tracked`; send `faults` signals to its processes, kinds and moments chosen by `seed`, strike at
    `points`, then let the run come to its end, and check what there is. `moved`: before that it goes on on another
    machine, under more of them."""
    config = learning(
        folder / "state",
        rollout={"batch_selection": random.Random(seed).choice(("wait", "drop", "admit")), "request_timeout_s": 20.0},
        training={"steps": ENDLESS, "checkpoint_every": 4, "keep_checkpoints": 2, "ranks": ranks},
        evaluation={"enabled": scored, "every": 20} | ({"servers": 2} if scored else {}),
        tracking={"enabled": tracked, "flush_timeout_s": 2.0},
        launch=_QUICK,
    )
    target = Target(folder, seed, config, points)
    try:
        _faults(target, faults)
        if moved:
            target.until(lambda: any(target.store.glob("checkpoints/*/manifest.json")), _START_S)
            target.strike("launcher", signal.SIGKILL)
            target.resume(move=True)
            _faults(target, len(KINDS))
        target.strike("launcher", signal.SIGKILL)
        seen = target.history.look()
        last = max((*(seen.rows if seen else ()), target.run.step()))
        target.resume(training={"steps": last + _MORE_STEPS})
        _to_the_end(target)
    finally:
        target.close()
    return target.result


def repeat(folder: Path, seed: int, kills: int, *, steps: int) -> tuple[Struck, bool]:
    """A synchronous run of so many steps in the new `folder`, undisturbed, and again under `kills` kills of its
    processes, kinds and moments chosen by `seed`: what was found, and whether both made the same weights and optimizer
    states, to the bit."""
    alone, killed = (
        learning(
            folder / name / "state",
            mode="sync",
            training={"steps": steps, "checkpoint_every": 4},
            generation={"servers": 1},
            launch=_QUICK,
        )
        for name in ("alone", "killed")
    )
    with Launched(alone, _RUN) as run:
        run.finished()
    target = Target(folder / "killed", seed, killed)
    try:
        for step in sorted(target.chance.sample(range(1, steps // 2), kills)):  # so that none comes after the end
            kind = target.chance.choice(_REPEATED)
            while not (target.working() and target.run.step() >= step and target.strike(kind, signal.SIGKILL)):
                assert not target.run.run.summary.exists(), f"the run ended before it was killed at step {step}"
                if target.over:
                    target.resume()
                target.tick()
        _to_the_end(target)
    finally:
        target.close()
    stores = (Path(config.state_dir) / "store" / "runs" / _RUN for config in (alone, killed))
    return target.result, len({_final(store, steps) for store in stores}) == 1


def _final(store: Path, steps: int) -> tuple[str, ...]:
    """Hashes of the final model, and of the state of the last step."""
    (state,) = store.glob(f"checkpoints/step-{steps:06d}.*")
    files = (store / "final" / "model.safetensors", state / "weights.safetensors", state / "optimizer.safetensors")
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _faults(target: Target, faults: int) -> None:
    """Strike until there were enough faults; then wait, up to a bound, until the run has met the points that it can
    meet on its way."""
    order: list[str] = []
    while faults and target.launches < _LAUNCHES:
        if not target.until(target.working, _START_S):
            target.strike("launcher", signal.SIGKILL)  # it may not be under way in time
            target.resume()
            continue
        if target.chance.random() < 0.3:
            target.jump()
        order = order or target.chance.sample(KINDS, len(KINDS))
        signum = signal.SIGKILL if target.chance.random() < 0.7 else signal.SIGSTOP
        faults -= target.strike(order.pop(), signum)
        # several at once, or soon after one another, or apart
        target.until(lambda: False, target.chance.choice((0.0, 0.2, 1.0)))
        if target.chance.random() < 0.6:
            target.until(lambda: not target.recovering, _RECOVERY_S)
    needs = {"", "scored", "tracked"} | ({"moved"} if target.moved else set())
    needs |= {"resumed"} if target.launches > 1 else set()
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline and any(point.needs in needs for point in target.missed.values()):
        if target.over:
            target.resume()
        target.tick()


def _to_the_end(target: Target) -> None:
    """Launch the run until it has come to its end, and check it."""
    for _ in range(_LAUNCHES):
        target.until(lambda: False, _END_S)
        if not target.over:
            break
        target.tick()
        if target.run.launcher.poll() == 0:
            target.leave()
            root, steps = target.run.run.root, target.config.training.steps
            target.result.findings.add(check(root, target.store, target.history.looks, steps=steps))
            return
        target.resume()
    target.result.output += target.run.output()
    target.result.unresumable(f"seed {target.seed}")


def _signal(pid: int, signum: signal.Signals) -> bool:
    """False where there is no such process."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False
