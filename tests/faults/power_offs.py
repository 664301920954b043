"""Losses of power: a run on a disk that forgets what was not synced, several times, to its end."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from tests.faults.checker import Outcome, check
from tests.faults.disk import Disk
from tests.faults.history import History
from tests.faults.learning import learning
from tests.support.runs import Launched

STEPS = 30
_RUN_S = 120.0  # for a run of seconds to lose its power, or to end
_LOOK_S = 0.02
_IMAGES = 8  # of a run that has ended
_RUN = "r"


def lose_power(folder: Path, seed: int, losses: int) -> Outcome:
    """Run in the new `folder`, lose power up to `losses` times, at moments and with losses chosen by `seed`, go on each
    time, and check what there is at the end."""
    chance = random.Random(seed)
    state = folder / "state"
    state.mkdir(parents=True)
    config = learning(
        state,
        rollout={"batch_selection": random.Random(seed).choice(("wait", "drop", "admit"))},
        training={"steps": STEPS, "checkpoint_every": 3, "keep_checkpoints": 2},
    )
    result = Outcome()
    for number in range(losses + 1):
        disk = Disk(state, folder / f"disk-{number}")
        history = History(folder / "history.jsonl", state / "runs" / _RUN / "ledger.sqlite", place=disk.now)
        with patch.dict(os.environ, disk.environment()):
            launched = Launched(config, _RUN)
        with launched as run:
            ended = _until(run, history, None if number == losses else chance)
            result.output += run.output()
        if ended is not None or number == losses:
            if ended != 0:
                last = result.output.splitlines()[-1]
                result.findings.unresumable.append(f"after {number} losses the run ended with {ended}: {last}")
            break
        now = disk.now()
        cut = now if chance.random() < 0.5 else chance.randrange(now + 1)
        disk.lose_power(cut, chance.randrange(2**31))
        history.lost_power(cut)
        result.faults["power"] += 1
    if not result.findings.unresumable:
        result.findings = check(run.run.root, state / "store" / "runs" / _RUN, history.entries(), steps=STEPS)
        for ended in _after_the_end(disk, folder, chance):
            entries = history.entries()
            result.findings.add(check(ended / "runs" / _RUN, ended / "store" / "runs" / _RUN, entries, steps=STEPS))
    return result


def _after_the_end(disk: Disk, folder: Path, chance: random.Random) -> Iterator[Path]:
    """What the disk may hold when power is lost once the run has ended: nobody will make anything again."""
    summary = [record.sequence for record in disk.records() if record.data.endswith(b"\0summary.json")]
    for number in range(_IMAGES if summary else 0):
        image = folder / f"ended-{number}"
        disk.image(image, chance.randrange(max(summary), disk.now() + 1), chance.randrange(2**31))
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
