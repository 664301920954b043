"""Faults from outside: a run whose messages are lost, whose store's server goes away, or whose machine loses power."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from areal_core.config.schema import RunConfig
from areal_core.storage.objects import Storage
from tests.faults.checker import Outcome, check
from tests.faults.disk import Disk
from tests.faults.history import History
from tests.faults.points import EVALUATOR, LAUNCHER, TRAINER, environment
from tests.support.radosgw import RadosGateway
from tests.support.runs import Launched, changed, learning

_CALL = "areal_core.api.controller_client:ControllerClient._call"
_CLIENTS = f"{TRAINER}|{EVALUATOR}|{LAUNCHER}"  # of the controller
_RUN = "r"
_END_S = 240.0  # for a run to end once it may
_LOOK_S = 0.02
_POWER_STEPS = 30
_POWER_S = 120.0  # for a run of seconds to lose its power, or to end
_IMAGES = 8  # of a run that has ended
_OUTAGE_STEPS = 1000  # more than there is time for
_MORE_STEPS = 5  # once the outages are over
_AWAY_S = (0.3, 6.0)
_PAUSE_S = 2.0  # at most, between two outages


def lose_messages(folder: Path, seed: int, *, steps: int = 60) -> Outcome:
    """Run in the new `folder`, to its end; requests and responses between its processes are lost, late and repeated, as
    `seed` says."""
    result, markers, state = Outcome(), folder / "markers", folder / "state"
    markers.mkdir(parents=True)
    launch = {"restarts": 1000, "stop_timeout_s": 3.0}
    config = learning(state, training={"steps": steps, "checkpoint_every": 5, "keep_checkpoints": 3}, launch=launch)

    def fault(name: str, target: str, when: str, action: str, chance: float, **fields: str) -> dict[str, Any]:
        about = {"name": name, "target": target, "when": when, "action": action, "chance": chance, "nth": 1}
        return {"process": _CLIENTS, "where": "", **about, **fields, "seed": seed, "marker": str(markers / name)}

    faults = [
        fault("request lost", "http.client:HTTPConnection.request", "enter", "reset", 0.04),
        fault("response lost", "http.client:HTTPConnection.getresponse", "exit", "reset", 0.04),
        fault("late", _CALL, "enter", "delay:0.02", 0.1),
        fault("repeated late", _CALL, "exit", "echo", 0.2, process=TRAINER, where="'POST'"),
    ]
    if run := _ended(config, seed, result, environment(faults, os.environ.get("PYTHONPATH", ""))):
        result.findings = check(run.run.root, state / "store" / "runs" / _RUN, (), steps=steps)
    result.faults.update({file.name: file.stat().st_size for file in markers.iterdir()})
    return result


def lose_store(folder: Path, seed: int, outages: int) -> Outcome:
    """Run in the new `folder`; `outages` times, by a choice of `seed`, have Ceph's gateway killed and started again, or
    stopped and go on; kill the run in the last one, and let it come to its end from what the store holds."""
    chance, result, state = random.Random(seed), Outcome(), folder / "state"
    (folder / "gateway").mkdir(parents=True)
    with RadosGateway(folder / "gateway") as gateway, patch.dict(os.environ, gateway.credentials):
        config = learning(
            state,
            storage={"url": "s3://areal/chaos", "endpoint_url": gateway.endpoint_url},
            training={"steps": _OUTAGE_STEPS, "checkpoint_every": 3, "keep_checkpoints": 2},
        )
        history = _history(state)
        with Launched(config, _RUN) as run:
            run.until_step(2)
            for left in reversed(range(outages)):
                _look_for(history, chance.uniform(0.0, _PAUSE_S))
                kill = chance.random() < 0.5
                (gateway.kill if kill else gateway.stop)()
                result.faults["s3 SIGKILL" if kill else "s3 SIGSTOP"] += 1
                _look_for(history, chance.uniform(*_AWAY_S))
                if left:
                    (gateway.start if kill else gateway.go_on)()
            status = run.launcher.poll()
            result.output += run.output()
        (gateway.start if kill else gateway.go_on)()
        if status is not None:
            result.unresumable(f"seed {seed}: ended with {status} in an outage")
            return result
        seen = history.look()
        steps = max(seen.rows if seen else (), default=run.step()) + _MORE_STEPS
        if not _ended(changed(config.to_dict(), training={"steps": steps}), seed, result):
            return result
        storage = Storage.open(f"{config.storage.url}/runs/{_RUN}", gateway.endpoint_url)
        for name in storage.list():  # into a folder, which the checker reads
            (file := folder / "store" / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(storage.get_bytes(name))
    result.findings = check(run.run.root, folder / "store", history.looks, steps=steps)
    return result


def lose_power(folder: Path, seed: int, losses: int) -> Outcome:
    """Run in the new `folder` on a disk that forgets what was not synced, lose power up to `losses` times, at moments
    and with losses chosen by `seed`, go on each time, and check what there is at the end."""
    chance, result, state = random.Random(seed), Outcome(), folder / "state"
    state.mkdir(parents=True)
    config = learning(
        state,
        rollout={"batch_selection": random.Random(seed).choice(("wait", "drop", "admit"))},
        training={"steps": _POWER_STEPS, "checkpoint_every": 3, "keep_checkpoints": 2},
    )
    history = _history(state)
    for number in range(losses + 1):
        disk = Disk(state, folder / f"disk-{number}")
        with patch.dict(os.environ, disk.environment()):
            launched = Launched(config, _RUN)
        with launched as run:
            ended = _until(run, history, disk, None if number == losses else chance)
            result.output += run.output()
        if ended is not None or number == losses:
            if ended != 0:
                result.unresumable(f"after {number} losses the run ended with {ended}")
                return result
            break
        now = disk.now()
        cut = now if chance.random() < 0.5 else chance.randrange(now + 1)
        disk.lose_power(cut, chance.randrange(2**31))
        history.lost_power(cut)
        result.faults["power"] += 1
    for left in (state, *_after_the_end(disk, folder, chance)):
        run_folder, store = left / "runs" / _RUN, left / "store" / "runs" / _RUN
        result.findings.add(check(run_folder, store, history.looks, steps=_POWER_STEPS))
    return result


def _history(state: Path) -> History:
    return History(state / "runs" / _RUN / "ledger.sqlite")


def _ended(config: RunConfig, seed: int, result: Outcome, settings: dict[str, str] | None = None) -> Launched | None:
    """A run that has come to its end in order; None where it does not. `settings` are variables of its environment."""
    with patch.dict(os.environ, settings or {}):
        launched = Launched(config, _RUN)
    with launched as run:
        try:
            status = run.launcher.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = None
        result.output += run.output()
    if status != 0:
        result.unresumable(f"seed {seed}: ended with {status}")
        return None
    return run


def _look_for(history: History, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        history.look()
        time.sleep(0.05)


def _after_the_end(disk: Disk, folder: Path, chance: random.Random) -> Iterator[Path]:
    """What the disk may hold when power is lost once the run has ended: nobody will make anything again."""
    summary = [record.sequence for record in disk.records() if record.data.endswith(b"\0summary.json")]
    for number in range(_IMAGES if summary else 0):
        image = folder / f"ended-{number}"
        disk.image(image, chance.randrange(max(summary), disk.now() + 1), chance.randrange(2**31))
        if (image / "runs" / _RUN / "summary.json").exists():
            yield image


def _until(run: Launched, history: History, disk: Disk, chance: random.Random | None) -> int | None:
    """Watch a run until a moment by `chance`, or to its end; the status that it ended with, None where it did not."""
    steps = run.step() + (0 if chance is None else chance.randrange(6))
    moment_s = 0.0 if chance is None else chance.uniform(0.0, 0.3)
    reached: float | None = None
    deadline = time.monotonic() + _POWER_S
    while time.monotonic() < deadline:
        status = run.launcher.poll()
        history.look(disk.now)
        if status is not None:
            return status
        if reached is None and run.run.ready_file("trainer").exists() and run.step() >= steps:
            reached = time.monotonic()
        if chance is not None and reached is not None and time.monotonic() >= reached + moment_s:
            return None
        time.sleep(_LOOK_S)
    return None
