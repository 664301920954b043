"""Runs as their users start them: a launcher in a process of its own, and checks of what it started and left."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from areal_core.config.schema import RunConfig, load
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.run.launcher import read_summary, run_folder
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from areal_core.types import GroupState, RunSummary
from tests.support.models import put_base_model
from tests.support.processes import TIMEOUT_S, command_line, kill_all, marked, wait_for

T = TypeVar("T")

MARK = "AREAL_TEST_RUN"  # in the environment of everything that a launcher starts, however deep
TINY: dict[str, Any] = {
    "tracking": {"enabled": False},
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 32},
    "warmup": {"worked_steps": 1, "worked_batch": 1, "direct_steps": 0},
    "task": {"held_out": 32, "max_new_tokens": 24},
    "algorithm": {"group_size": 4},
    "rollout": {"batch_size": 32},
    "training": {"steps": 4, "minibatches": 2, "checkpoint_every": 3},
}
# Were all rewards the same, so would be all weights, and no mistaken one would be seen.
_LEARNING: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 64},
    "warmup": {"worked_steps": 300, "worked_batch": 32, "direct_steps": 60},
    "task": {"held_out": 32, "max_operations": 2, "max_new_tokens": 96},
    "rollout": {"batch_size": 16},
    "training": {"minibatches": 2, "ranks": 1, "learning_rate": 3e-3},
    "evaluation": {"enabled": False},
}


def tiny(state: Path, *, mode: str = "async", warm: bool = True, **groups: dict[str, Any]) -> RunConfig:
    """A run of seconds, in async mode with one server and one rank; `groups` change fields of it. Its base model is
    there, unless the run is to make it itself: `warm` is then False."""
    base = TINY | {"mode": mode, "state_dir": str(state), "storage": {"url": str(state / "store"), "lease_s": 4.0}}
    if mode == "async":
        base |= {"generation": {"servers": 1}, "training": TINY["training"] | {"ranks": 1}}
    config = changed(base, **groups)
    if warm:
        put_base_model(config)
    return config


def learning(state: Path, *, mode: str = "async", **groups: dict[str, Any]) -> RunConfig:
    """A tiny run, with one server and one rank, in whose groups of an eighth some completions are right."""
    return tiny(state, mode=mode, **merged(_LEARNING, groups))


def changed(base: dict[str, Any], **fields: dict[str, Any]) -> RunConfig:
    """`base` with some fields of its groups changed."""
    return load(merged(base, fields))


def merged(base: dict[str, Any], fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return base | {name: base.get(name, {}) | values for name, values in fields.items()}


class Watched:
    """A run at work; `launcher` is the process that ends with it."""

    run: RunDir
    launcher: subprocess.Popen[Any]
    timeout_s = TIMEOUT_S  # for whatever is waited for

    def output(self) -> str:
        raise NotImplementedError

    def wait_for(self, what: str, condition: Callable[[], T | None]) -> T:
        """What `condition` gives once it gives something, while the launcher lives."""

        def look() -> T | None:
            found = condition()
            assert found or self.launcher.poll() is None, f"the launcher ended before: {what}\n{self.output()}"
            return found

        return wait_for(look, lambda: f"{what}\n{self.output()}", self.timeout_s)

    def pid(self, role: str, index: int = 0, *, but: int = 0) -> int:
        """The process of a role once it is ready, another one than `but`. Machines share process numbers."""

        def ready() -> int | None:
            info = self.run.ready_info(role, index)
            return info["pid"] if info and info["pid"] != but else None

        return ready() or self.wait_for(f"{role}-{index} is ready", ready)

    def url(self, role: str, index: int = 0) -> str:
        """Where the process of a role listens that was ready last, once one was: of another machine's process the head
        node hears after others have."""
        self.pid(role, index)
        return json.loads(self.run.ready_file(role, index).read_text())["url"]

    def step(self) -> int:
        """The newest published version."""
        newest = weights.newest(self.run.weights)
        return 0 if newest is None else newest.version

    def until_step(self, step: int) -> None:
        """Return once version `step`, or a later one, is published."""
        self.wait_for(f"step {step}", lambda: self.step() >= step)


class Launched(Watched):
    """`python -m areal_core` at work. A context: whatever is left at its end is killed."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self.config = config
        self.run = run_folder(config, run_id)
        self._mark = secrets.token_hex(8)
        state = Path(config.state_dir)
        state.mkdir(parents=True, exist_ok=True)
        file = state / f"{run_id}.json"
        file.write_text(json.dumps(config.to_dict()))
        self._output = (state / f"{run_id}.{self._mark}.txt").open("w+")
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "areal_core", "--run-id", run_id, "--config", str(file)],
            env={**os.environ, MARK: self._mark},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self.processes)
        self.launcher.wait()
        self._output.close()

    def output(self) -> str:
        return Path(self._output.name).read_text()

    def last_pid(self, role: str, index: int = 0) -> int:
        """The process of a role that was ready last."""
        return json.loads(self.run.ready_file(role, index).read_text())["pid"]

    def children(self, pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self) -> int:
        """The launcher's exit status; nothing that it started may be left."""
        try:
            status = self.launcher.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher hangs\n{self.output()}") from None
        left = {pid: command_line(pid) for pid in self.processes()}
        assert not left, f"left running: {left}\n{self.output()}"
        return status

    def processes(self) -> list[int]:
        """Everything that runs and was started by the launcher, itself included, in whatever session."""
        return marked(MARK, self._mark)

    def gone(self) -> None:
        """Wait until nothing is left of a run whose launcher is gone."""
        wait_for(lambda: not self.processes(), lambda: f"the end of {self.processes()}", self.timeout_s)

    def finished(self, *, rewound: bool = False) -> RunSummary:
        """The summary of a run that ended in order, after a look at everything that has to hold then; see
        `checked_summary`."""
        status = self.end()
        assert status == 0, self.output()
        summary = checked_summary(self.run, self.config, rewound=rewound)
        assert Path(summary.model_url, "model.safetensors").exists()
        return summary

    def failed(self) -> str:
        """The one line that a failed run ends with."""
        status = self.end()
        assert status == 1, self.output()
        assert not self.run.summary.exists()
        line = self.output().rstrip().splitlines()[-1]
        assert line.startswith("areal: error: ")
        return line


def checked_summary(run: RunDir, config: RunConfig, *, rewound: bool = False) -> RunSummary:
    """The summary of a run that ended in order: no batch was lost or used twice, no version is missing or was made
    twice, and the token ledger balances. One that has `rewound`, on another machine, from the store, may have known of
    later versions than the checkpoint's there: these are made twice. Of steps that are folded there are totals."""
    summary = read_summary(run)
    steps = config.training.steps
    assert (summary.steps, summary.reason) == (steps, "steps")
    assert summary.incarnation in ((0, 1) if rewound else (0,))
    assert summary.tokens.balanced
    ledger = TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)
    kept = range(max(1, ledger.payloads.forgotten), steps + 1)
    batches = [ledger.batch(step) for step in kept]
    rows = [group for batch in batches if batch for group in batch.groups]
    assert len({group.group_id for group in rows}) == len(rows) == len(kept) * config.groups_per_batch
    assert ledger.counts()[GroupState.CONSUMED] == steps * config.groups_per_batch
    assert ledger.tokens().consumed == summary.tokens.consumed
    assert len(kept) < steps or sum(sum(group.lengths) for group in rows) == summary.tokens.consumed
    assert all(ledger.versions.get(version) for version in (0, *kept))
    assert ledger.last_step() == steps
    ledger.close()
    return summary
