"""Faults of processes: a run whose processes are killed and stopped at random and at named points, to its end."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from areal_core.api.access import authorization
from areal_core.config.schema import RunConfig
from tests.faults.checker import Outcome, check, orphans
from tests.faults.disk import Clock, compiler
from tests.faults.history import History
from tests.faults.points import Point, environment
from tests.support.runs import MARK, Launched, changed, learning

KINDS = ("trainer", "rank", "controller", "generation", "reward", "evaluator", "evaluation", "tracker", "launcher")
_PLACES = {"rank": ("trainer", 1)}  # the second one of a role
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


@dataclass(slots=True)
class Struck(Outcome):
    """A run whose processes were struck."""

    jumps: int = 0  # of the wall clock
    points: set[str] = field(default_factory=set[str])  # that were struck
    recovery_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    ends: list[str] = field(default_factory=list[str])  # last lines of launchers that nobody had killed


@dataclass(slots=True)
class _Recovery:
    """A process that was struck, and what tells that its role has progressed again."""

    kind: str
    since: float
    progressed: Callable[[], bool]


class Target:
    """A run under faults, across its launchers."""

    def __init__(self, folder: Path, seed: int, config: RunConfig, points: Sequence[Point] = ()) -> None:
        """A run whose state is below the new `folder`, and which is struck at `points`, whenever they are reached."""
        self.chance = random.Random(seed)
        self.result, self.seed = Struck(), seed
        self.state, self._markers = Path(config.state_dir), folder / "markers"
        self._markers.mkdir(parents=True)
        self.config = config
        self.store = self.state / "store" / "runs" / _RUN
        self._clock = Clock(folder / "clock") if compiler() else None
        self._points = {point.name: point for point in points}
        self._faults = [point.fault("kill", self._markers) for point in points]
        self._stack = ExitStack()
        self._recoveries: list[_Recovery] = []
        self._stopped: dict[int, float] = {}  # pid -> when it goes on
        self._groups: set[int] = set()  # process groups that were seen
        self.launches = 0
        self.moved = False
        self._killed = False  # the launcher, by us
        self.history = History(folder / "history.jsonl", self.state / "runs" / _RUN / "ledger.sqlite")
        self.run = self._launch()

    def close(self) -> None:
        self._stack.close()

    # -- launchers -------------------------------------------------------------------------------------------------

    def _launch(self) -> Launched:
        self.launches += 1
        self._killed = False
        self.history.write("launch", steps=self.config.training.steps)
        clock = self._clock.environment() if self._clock else {}
        with patch.dict(os.environ, environment(self._faults, os.environ.get("PYTHONPATH", "")) | clock):
            return self._stack.enter_context(Launched(self.config, _RUN))

    def resume(self, *, move: bool = False, **groups: dict[str, Any]) -> None:
        """Launch the run again, with fields of its configuration changed, once nothing is left of the launcher before.
        `move`: on another machine, where its folder is not."""
        status = self.run.launcher.wait(_GONE_S)
        self._go_on(everything=True)
        deadline = time.monotonic() + _GONE_S
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        self.result.findings.orphans += left
        output = self.run.output()
        self.result.output += output
        if not self._killed:
            self.result.ends.append(f"{status}: {(output.strip().splitlines() or ['nothing'])[-1]}")
        self._stack.close()  # kills what is left
        self._groups.clear()
        self._recoveries.clear()
        if move:
            self.moved = True
            steps = [
                file.parent.name[5:].partition(".")[0] for file in self.store.glob("checkpoints/step-*/manifest.json")
            ]
            shutil.rmtree(self.run.run.root)
            self.history.moved(max(map(int, steps), default=0))
        self.config = changed(self.config.to_dict(), **groups)
        self.run = self._launch()

    def left(self) -> list[str]:
        return orphans(f"{MARK}={self.run._mark}", self._groups)

    # -- what is seen ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at everything: the ledger, points that were struck, processes that go on or are back."""
        time.sleep(_TICK_S)
        self.history.look()
        for name, point in self._points.items():
            if name not in self.result.points and (self._markers / name).exists():
                self.result.points.add(name)
                self._note(_kind(point), "SIGKILL", point=name)
        self._go_on()
        for kind in ("controller", "trainer", "rank", "generation", "evaluator", "evaluation", "tracker"):
            with suppress(OSError, ValueError):
                self._groups.add(os.getpgid(self._last_pid(kind)))
        now = time.monotonic()
        for recovery in list(self._recoveries):
            if recovery.progressed():
                self.result.recovery_s.setdefault(recovery.kind, []).append(now - recovery.since)
                self.history.write("recovered", process=recovery.kind, seconds=now - recovery.since)
                self._recoveries.remove(recovery)

    @property
    def recovering(self) -> bool:
        return bool(self._recoveries or self._stopped)

    @property
    def over(self) -> bool:
        """The launcher has ended."""
        return self.run.launcher.poll() is not None

    @property
    def missed(self) -> list[Point]:
        """Points that were not reached."""
        return [point for name, point in self._points.items() if name not in self.result.points]

    def working(self) -> bool:
        """All processes of the run are ready, and steps are made."""
        roles = ["controller", "trainer", "generation"]
        roles += ["evaluator", "evaluation"] if self.config.evaluation.enabled else []
        return all(self.run.run.ready_file(role).exists() for role in roles) and self._trained() > 0

    # -- faults ----------------------------------------------------------------------------------------------------

    def strike(self, kind: str, signum: signal.Signals) -> bool:
        """Send a signal to a process of a kind; False where there is none now."""
        pid = self._pid(kind)
        if pid is None or (pid in self._stopped and signum is signal.SIGSTOP):
            return False
        if kind == "launcher" and signum is signal.SIGKILL:
            self._killed = True
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            if signum is signal.SIGSTOP:
                self._stopped[pid] = time.monotonic() + self.chance.uniform(*_PAUSE_S)
            self._note(kind, signum.name, pid=pid)
            return True
        return False

    def jump(self) -> None:
        """The wall clock of all processes is wrong from now on, by another amount."""
        if self._clock is not None:
            seconds = self.chance.choice(_JUMPS_S)
            self._clock.jump(seconds)
            self.result.jumps += 1
            self.history.write("jump", seconds=seconds)

    def _note(self, kind: str, signum: str, **about: Any) -> None:
        self.result.faults[f"{kind} {signum}"] += 1
        self.history.write("fault", process=kind, signal=signum, **about)
        if kind == "launcher" and signum == "SIGKILL":
            self._killed = True
        if kind in TIMED and not any(one.kind == kind for one in self._recoveries):
            self._recoveries.append(_Recovery(kind, time.monotonic(), self._progress(kind, signum, about)))

    def _progress(self, kind: str, signum: str, about: dict[str, Any]) -> Callable[[], bool]:
        killed = signum == "SIGKILL"
        before = about.get("pid", 0) if killed else 0
        if "point" in about:
            before = int((self._markers / about["point"]).read_text() or 0)
        if kind == "trainer":
            trained = self._trained()
            return lambda: self._trained() > trained
        if kind == "controller":
            return lambda: self._pid(kind) not in (None, before) and self._ask("/status") is not None
        return lambda: self._pid(kind) not in (None, before) and self._serves()

    def _go_on(self, *, everything: bool = False) -> None:
        for pid, when in list(self._stopped.items()):
            if everything or time.monotonic() >= when:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                del self._stopped[pid]

    def _pid(self, kind: str) -> int | None:
        """A process of a kind that is alive."""
        if kind == "launcher":
            return None if self.over else self.run.launcher.pid
        try:
            if kind != "reward":
                pid = self._last_pid(kind)
                return pid if str(self.run.run.root).encode() in _command(pid) else None
            workers = [
                pid for pid in self.run.children(self.run.last_pid("controller")) if b"spawn_main" in _command(pid)
            ]
            return self.chance.choice(workers) if workers else None
        except (OSError, ValueError):
            return None

    def _last_pid(self, kind: str) -> int:
        role, index = _PLACES.get(kind, (kind, 0))
        return self.run.last_pid(role, index)

    def _trained(self) -> int:
        """Steps that were trained, replayed ones too."""
        file = self.run.run.timeline_file("trainer")
        return file.read_bytes().count(b'["train"') if file.exists() else 0

    def _serves(self) -> bool:
        """The generation server that was ready last takes work."""
        with suppress(OSError, ValueError):
            url = self.run.url("generation")
            return any(one["url"] == url and one["state"] == "serving" for one in self._ask("/servers") or ())
        return False

    def _ask(self, path: str) -> Any:
        """What the controller answers; None where it does not within a second."""
        try:
            headers = authorization(self.run.run.token())
            request = urllib.request.Request(self.run.url("controller") + path, headers=headers)
            with urllib.request.urlopen(request, timeout=1.0) as response:
                return json.load(response)
        except (OSError, ValueError, urllib.error.URLError):
            return None


def strike(
    folder: Path,
    seed: int,
    faults: int,
    points: Sequence[Point] = (),
    *,
    kinds: Sequence[str] = KINDS,
    scored: bool = True,
    tracked: bool = True,
    moved: bool = False,
    ranks: int = 1,
) -> Struck:
    """Run in the new `folder`, with this many ranks, an evaluator with a server where it is `scored`, and a tracker
    where it is `tracked`; send `faults` signals to processes of these kinds, kinds and moments chosen by `seed`, strike
    at `points`, then let the run come to its end, and check what there is. `moved`: before that it goes on on another
    machine, under more of them."""
    policy = random.Random(seed).choice(("wait", "drop", "admit"))
    config = _config(folder / "state", policy, scored=scored, tracked=tracked, ranks=ranks)
    target = Target(folder, seed, config, points)
    try:
        _faults(target, faults, kinds)
        if moved:
            _until(target, lambda: any(target.store.glob("checkpoints/*/manifest.json")), _START_S)
            target.strike("launcher", signal.SIGKILL)
            target.resume(move=True)
            _faults(target, len(KINDS), kinds)
        _end(target)
        (folder / "output.txt").write_text(target.result.output)
    finally:
        target.close()
    return target.result


def repeat(folder: Path, seed: int, kills: int, *, steps: int) -> tuple[Struck, bool]:
    """A synchronous run of so many steps in the new `folder`, undisturbed, and again under `kills` kills of its
    processes, kinds and moments chosen by `seed`: what was found, and whether both made the same weights and optimizer
    states, to the bit."""
    with Launched(_synchronous(folder / "alone" / "state", steps), _RUN) as alone:
        alone.finished()
    target = Target(folder / "killed", seed, _synchronous(folder / "killed" / "state", steps))
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
    stores = (folder / one / "state" / "store" / "runs" / _RUN for one in ("alone", "killed"))
    return target.result, len({_final(store, steps) for store in stores}) == 1


def _final(store: Path, steps: int) -> tuple[str, ...]:
    """Hashes of the final model, and of the state of the last step."""
    (state,) = store.glob(f"checkpoints/step-{steps:06d}.*")
    files = (store / "final" / "model.safetensors", state / "weights.safetensors", state / "optimizer.safetensors")
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _faults(target: Target, faults: int, kinds: Sequence[str]) -> None:
    """Strike until there were enough faults; then make sure that all points that can be reached now were."""
    order: list[str] = []
    while faults and target.launches < _LAUNCHES:
        if not _until(target, target.working, _START_S):
            if not target.over:
                target.result.ends.append(f"not under way in {_START_S:g} s")
                target.strike("launcher", signal.SIGKILL)
            target.resume()
            continue
        if target.chance.random() < 0.3:
            target.jump()
        order = order or target.chance.sample(list(kinds), len(kinds))
        signum = signal.SIGKILL if target.chance.random() < 0.7 else signal.SIGSTOP
        if target.strike(order.pop(), signum):
            faults -= 1
        pause_s = target.chance.choice((0.0, 0.2, 1.0))  # several at once, or soon after one another, or apart
        _until(target, lambda: False, pause_s)
        if target.chance.random() < 0.6:
            _until(target, lambda: not target.recovering, _RECOVERY_S)
    _settle(target)


def _settle(target: Target) -> None:
    """Wait, up to a bound, until the run has met the points that it can meet on its way."""
    deadline = time.monotonic() + _SETTLE_S
    needs = {"", "scored", "tracked", *(["resumed"] if target.launches > 1 else [])}
    needs |= {"moved"} if target.moved else set()
    while time.monotonic() < deadline and any(point.needs in needs for point in target.missed):
        if target.over:
            target.resume()
        target.tick()


def _until(target: Target, condition: Callable[[], bool], limit_s: float) -> bool:
    """Watch until `condition` holds; False where the launcher has ended before, or it took too long."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not target.over:
        target.tick()
        if condition():
            return True
    return False


def _end(target: Target) -> None:
    """Have the run make a few more steps and end, whatever strikes it on the way, and check it."""
    target.strike("launcher", signal.SIGKILL)
    seen = target.history.look()
    last = max((*(seen.rows if seen else ()), target.run.step()))
    target.resume(training={"steps": last + _MORE_STEPS})
    _to_the_end(target)


def _to_the_end(target: Target) -> None:
    """Launch the run until it has come to its end, and check it."""
    for _ in range(_LAUNCHES):
        if not _until(target, lambda: target.over, _END_S) and not target.over:
            break
        target.tick()
        if target.run.launcher.poll() == 0:
            target.result.findings.orphans += target.left()
            run = target.run.run.root
            found = check(run, target.store, target.history.entries(), steps=target.config.training.steps)
            found.orphans += target.result.findings.orphans
            found.unresumable += target.result.findings.unresumable
            target.result.findings = found
            target.result.output += target.run.output()
            return
        target.resume()
    target.result.output += target.run.output()
    target.result.unresumable(f"seed {target.seed}")


def _config(state: Path, policy: str, *, scored: bool, tracked: bool, ranks: int) -> RunConfig:
    return learning(
        state,
        rollout={"batch_selection": policy, "request_timeout_s": 20.0},
        training={"steps": ENDLESS, "checkpoint_every": 4, "keep_checkpoints": 2, "ranks": ranks},
        evaluation={"enabled": scored, "every": 20} | ({"servers": 2} if scored else {}),
        tracking={"enabled": tracked, "flush_timeout_s": 2.0},
        launch={"restarts": 1000, "stop_timeout_s": 3.0},
    )


def _synchronous(state: Path, steps: int) -> RunConfig:
    return learning(
        state,
        mode="sync",
        training={"steps": steps, "checkpoint_every": 4},
        generation={"servers": 1},
        launch={"restarts": 1000, "stop_timeout_s": 3.0},
    )


def _kind(point: Point) -> str:
    """The kind of process that a point is in."""
    from tests.faults import points

    names = ("LAUNCHER", "CONTROLLER", "TRAINER", "SERVER", "EVALUATION", "REWARD", "EVALUATOR", "TRACKER")
    pattern = next(name for name in names if getattr(points, name) == point.process)
    return {"SERVER": "generation"}.get(pattern, pattern.lower())


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def reachable(points: Iterable[Point], *, scored: bool, tracked: bool, moved: bool) -> list[Point]:
    """Those that a run of this kind can reach; all runs are resumed."""
    there = {"": True, "resumed": True, "end": True, "scored": scored, "tracked": tracked, "moved": moved}
    return [point for point in points if there[point.needs]]
