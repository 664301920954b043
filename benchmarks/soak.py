"""What grows in a long run? Memory, handles and threads of its processes, queues, files.

    python -m benchmarks.soak [--minutes 30] [--out FILE] [field=value ...]

A small model makes a step in a fraction of a second, so that a small leak per step shows. The benchmark samples
everything every few seconds. The last line compares the median of the second third of all samples with that of the last
third, and prints each change as a share of the former. Records of every step or score (ledger, spans, metrics, logs)
always grow; the last line has their bytes per step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from areal_core.__main__ import configuration
from areal_core.config.schema import RunConfig
from areal_core.run.launcher import run_folder
from benchmarks import _harness

_RUN = "soak"
_SETTING = (
    *("model.hidden_size=32", "model.layers=2", "model.heads=2", "model.kv_heads=2", "model.intermediate_size=64"),
    *("warmup.worked_steps=300", "warmup.direct_steps=60", "task.held_out=32", "task.max_operations=2"),
    *("task.max_new_tokens=96", "rollout.batch_size=32", "algorithm.group_size=4", "training.steps=1000000"),
    *("evaluation.every=200", "training.checkpoint_every=20"),
)
_EVERY_S = 5.0
_ROLES = {  # by their command lines
    "launcher": r"-m areal_core( |$)",
    "sweeper": r"sweeper\.py",
    "controller": r"controller\.service",
    "reward workers": r"rewards\.worker import serve",
    "generation": r"server\.routes.*ready/generation-",
    "evaluation": r"server\.routes.*ready/evaluation-",
    "trainer": r"training\.trainer",
    "evaluator": r"evaluation\.evaluator",
    "tracker": r"-m areal_core\.tracking",
}
_BOOKS = ("outbox", "timeline", "logs", "evaluations")  # what is kept of every step
_STATES = ("inflight", "ready")


class Soak:
    """One run and all samples of it."""

    def __init__(self, config: RunConfig, launcher: psutil.Popen) -> None:
        self._folder = run_folder(config, _RUN).root
        self._store = Path(config.storage.url)
        self._launcher = launcher
        self.looks: list[dict[str, float]] = []

    def look(self) -> None:
        """Add a sample once the run makes steps."""
        seen: Counter[str] = Counter()
        for process in [self._launcher, *self._launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                line = " ".join(process.cmdline())
                role = next((role for role, pattern in _ROLES.items() if re.search(pattern, line)), None)
                if role is not None:
                    seen[f"memory MB/{role}"] += process.memory_info().rss / 2**20
                    seen[f"handles/{role}"] += process.num_fds()
                    seen[f"threads/{role}"] += process.num_threads()
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{self._folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger,
        ):
            seen["step"] = ledger.execute("SELECT COALESCE(MAX(version), 0) FROM versions").fetchone()[0]
            for state in _STATES:
                seen[f"queues/{state} groups"] = ledger.execute(
                    "SELECT COUNT(*) FROM groups WHERE state = ?", (state,)
                ).fetchone()[0]
        for name, root in (("run", self._folder), ("store", self._store)):
            for folder, _, files in os.walk(root):  # which may lose folders meanwhile
                for file in (Path(folder, one) for one in files):
                    with suppress(FileNotFoundError):
                        kind = file.relative_to(root).parts[0].partition(".")[0] if name == "run" else "objects"
                        seen[f"bytes/{name} {kind}"] += file.stat().st_size
                        seen[f"files/{name} {kind}"] += 1
        if seen["step"]:
            self.looks.append(dict(seen))

    def result(self) -> dict[str, Any]:
        """Changes from the second third to the last one, and the growth of permanent records."""
        third = len(self.looks) // 3
        middle, last = self.looks[third : 2 * third], self.looks[2 * third :]
        steps = self.looks[-1]["step"]

        def both(name: str) -> tuple[float, float]:
            first, second = (statistics.median(look.get(name, 0.0) for look in looks) for looks in (middle, last))
            return first, second

        names = sorted(
            {name for look in self.looks for name in look} - {"step", *(f"bytes/run {one}" for one in _BOOKS)}
        )
        changes = {name: both(name) for name in names}
        return {
            "steps": int(steps),
            "looks": len(self.looks),
            "unchanged": sum(first == second for first, second in changes.values()),
            "change": {
                name: {
                    "from": round(first, 1),
                    "to": round(second, 1),
                    "share": round((second - first) / max(first, 1), 3),
                }
                for name, (first, second) in changes.items()
                if first != second
            },
            "bytes_a_step": {book: round(self.looks[-1].get(f"bytes/run {book}", 0.0) / steps, 1) for book in _BOOKS},
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="areal-soak-") as state:
        config = configuration({}, [f"state_dir={state}", f"storage.url={state}/store", *_SETTING, *options.overrides])
        file = Path(state) / "soak.json"
        file.write_text(json.dumps(config.to_dict()))
        with (Path(state) / "output.txt").open("w+") as output:
            command = [sys.executable, "-m", "areal_core", "--run-id", _RUN, "--config", str(file)]
            launcher = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            soak = Soak(config, launcher)
            try:
                deadline = time.monotonic() + 60 * options.minutes
                while time.monotonic() < deadline:
                    time.sleep(_EVERY_S)
                    if launcher.poll() is not None:
                        raise SystemExit(f"areal: error: the run ended early: {Path(output.name).read_text()[-500:]}")
                    soak.look()
                    if options.out is not None:
                        options.out.write_text("".join(json.dumps(look) + "\n" for look in soak.looks))
            finally:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait()
    return {"minutes": options.minutes, **soak.result()}


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, help="file for all samples, as lines of JSON")
    options = parser.parse_intermixed_args()
    _harness.report(lambda: measure(options))


if __name__ == "__main__":
    main()
