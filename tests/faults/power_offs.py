"""Losses of power: a run on a disk that forgets what was not synced, several times, to its end."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from areal_core.config.schema import RunConfig
from tests.faults.checker import Findings, check
from tests.faults.disk import Disk
from tests.faults.history import History
from tests.faults.learning import learning
from tests.support.runs import Launched

STEPS = 30
_RUN_S = 120.0  # for a run of seconds to lose its power, or to end
_LOOK_S = 0.02
_IMAGES = 8  # of a run that has ended
_RUN = "r"


@dataclass(slots=True)
class PowerOffs:
    """One run: what was done to it, and what came of it."""

    seed: int
    strict: bool
    losses: int = 0
    findings: Findings = field(default_factory=Findings)
    output: str = ""  # of all launchers


def config_of(state: Path, seed: int) -> RunConfig:
    """A run of seconds; the policy of its batches is chosen by the seed."""
    policy = random.Random(seed).choice(("wait", "drop", "admit"))
    return learning(
        state,
        rollout={"batch_selection": policy},
        training={"steps": STEPS, "checkpoint_every": 3, "keep_checkpoints": 2},
    )


def lose_power(folder: Path, seed: int, losses: int, *, strict: bool = False) -> PowerOffs:
    """Run in the new `folder`, lose power up to `losses` times, at moments and with losses chosen by `seed`, go on each
    time, and check what there is at the end."""
    chance = random.Random(seed)
    state = folder / "state"
    state.mkdir(parents=True)
    config = config_of(state, seed)
    result = PowerOffs(seed, strict)
    history: History | None = None
    while True:
        disk = Disk(state, folder / f"disk-{result.losses}")
        history = History(folder / "history.jsonl", state / "runs" / _RUN / "ledger.sqlite", place=disk.now)
        last = result.losses == losses
        with patch.dict(os.environ, disk.environment()):
            launched = Launched(config, _RUN)
        with launched as run:
            ended = _until(run, history, None if last else chance)
            result.output += run.output()
        if ended is not None:
            if ended:
                result.findings.unresumable.append(
                    f"after {result.losses} losses the run ended with {ended}: {result.output.splitlines()[-1]}"
                )
            break
        if last:
            result.findings.unresumable.append(f"after {losses} losses the run did not end in {_RUN_S:g} s")
            break
        now = disk.now()
        cut = now if chance.random() < 0.5 else chance.randrange(now + 1)
        disk.lose_power(cut, chance.randrange(2**31), strict=strict)
        history.lost_power(cut)
        result.losses += 1
    if not result.findings.unresumable:
        result.findings = check(run.run.root, state / "store" / "runs" / _RUN, history.entries(), steps=STEPS)
        for ended in _after_the_end(disk, folder, chance, strict=strict):
            entries = history.entries()
            result.findings.add(check(ended / "runs" / _RUN, ended / "store" / "runs" / _RUN, entries, steps=STEPS))
    return result


def _after_the_end(disk: Disk, folder: Path, chance: random.Random, *, strict: bool) -> Iterator[Path]:
    """What the disk may hold when power is lost once the run has ended: nobody will make anything again."""
    summary = [record.sequence for record in disk.records() if record.data.endswith(b"\0summary.json")]
    for number in range(_IMAGES if summary else 0):
        image = folder / f"ended-{number}"
        disk.image(image, chance.randrange(max(summary), disk.now() + 1), chance.randrange(2**31), strict=strict)
        if (image / "runs" / _RUN / "summary.json").exists():
            yield image


def _until(run: Launched, history: History, chance: random.Random | None) -> int | None:
    """Watch a run until a moment by `chance`, or to its end; the status that it ended with, None where it did not."""
    steps = run.step() + (0 if chance is None else chance.randrange(6))
    moment_s = 0.0 if chance is None else chance.uniform(0.0, 0.3)
    reached: float | None = None
    deadline = time.monotonic() + _RUN_S
    while time.monotonic() < deadline:
        if (status := run.launcher.poll()) is not None:
            history.look()
            return status
        history.look()
        if reached is None and run.run.ready_file("trainer").exists() and run.step() >= steps:
            reached = time.monotonic()
        if chance is not None and reached is not None and time.monotonic() >= reached + moment_s:
            return None
        time.sleep(_LOOK_S)
    return None
