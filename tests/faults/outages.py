"""Faults of the store's server: a run whose S3 server, Ceph's gateway, is killed and stopped under it, to its end."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

from areal_core.storage.objects import Storage
from tests.faults.checker import Outcome, check
from tests.faults.history import History
from tests.faults.learning import learning
from tests.support.radosgw import RadosGateway
from tests.support.runs import Launched, changed

_RUN = "r"
_STEPS = 1000  # more than there is time for
_MORE_STEPS = 5
_WAIT_S = 180.0
_AWAY_S = (0.3, 6.0)
_PAUSE_S = 2.0  # at most, between two outages


def strike(folder: Path, seed: int, outages: int) -> Outcome:
    """Run in the new `folder`; `outages` times, by a choice of `seed`, have the gateway killed and started again, or
    stopped and go on; kill the run in the last one, and let it come to its end from what the store holds."""
    chance, result, state = random.Random(seed), Outcome(), folder / "state"
    (folder / "gateway").mkdir(parents=True)
    with RadosGateway(folder / "gateway") as gateway, patch.dict(os.environ, gateway.credentials):
        config = learning(
            state,
            storage={"url": "s3://areal/chaos", "endpoint_url": gateway.endpoint_url},
            training={"steps": _STEPS, "checkpoint_every": 3, "keep_checkpoints": 2},
        )
        history = History(folder / "history.jsonl", state / "runs" / _RUN / "ledger.sqlite")
        with Launched(config, _RUN) as run:
            run.until_step(2)
            for left in reversed(range(outages)):
                _look_for(history, chance.uniform(0.0, _PAUSE_S))
                kill = chance.random() < 0.5
                (gateway.kill if kill else gateway.stop)()
                result.faults["s3 SIGKILL" if kill else "s3 SIGSTOP"] += 1
                history.write("fault", process="s3", signal="SIGKILL" if kill else "SIGSTOP")
                _look_for(history, chance.uniform(*_AWAY_S))
                if left:
                    (gateway.start if kill else gateway.go_on)()
            ended = run.launcher.poll()
            result.output += run.output()
        (gateway.start if kill else gateway.go_on)()
        if ended is not None:
            result.findings.unresumable.append(f"seed {seed}: ended with {ended} in an outage: {_last(result.output)}")
            return result
        seen = history.look()
        steps = max(seen.batches if seen else (), default=run.step()) + _MORE_STEPS
        with Launched(changed(config.to_dict(), training={"steps": steps}), _RUN) as run:
            try:
                status = run.launcher.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                status = None
            result.output += run.output()
        if status != 0:
            result.findings.unresumable.append(f"seed {seed}: ended with {status}: {_last(result.output)}")
            return result
        _mirror(Storage.open(f"{config.storage.url}/runs/{_RUN}", gateway.endpoint_url), folder / "store")
    result.findings = check(run.run.root, folder / "store", history.entries(), steps=steps)
    return result


def _look_for(history: History, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        history.look()
        time.sleep(0.05)


def _mirror(storage: Storage, target: Path) -> None:
    """Copy all objects into a folder, which the checker reads."""
    for name in storage.list():
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(storage.get_bytes(name))


def _last(output: str) -> str:
    return (output.strip().splitlines() or ["nothing"])[-1]
