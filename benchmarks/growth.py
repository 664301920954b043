"""Does the ledger stay fast and small in a long run? Its calls on the event loop, and the uploads of checkpoints.

    python -m benchmarks.growth [--groups 1000000] [--steps 10000] [--groups-per-step 32]

`unfolded` and `folded`: a ledger with this many groups, a tenth of them dropped, the others consumed; before pruning,
and after all possible pruning. `longest_ms` has the longest time of each call that the controller makes on its event
loop, over a few steps as in a run; `longest_call` is the worst of these. It includes waits for the disk, as commits are
synced as in a run, and for a core that other processes use; `cpu` excludes both. `folding` has the same for the calls
that prune, which yield to the event loop after each.

`uploads`: this many emulated steps with the controller's own payload store, snapshots, recorder and retention. A group
has 8 completions of 512 tokens, 53 kB. Most runs have larger groups, beside which the ledger counts for less. Every 5th
version is scored, as by default; scores stay in the ledger, some 200 bytes each. `ledger_bytes` and `payload_bytes` are
the uploads of the checkpoints after a tenth of the steps and after all. `growth` is the relative growth of their sum;
`largest_ledger_bytes` is the largest of any checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_core.config.schema import load
from areal_core.controller.core.ledger import Selection, TrajectoryLedger, snapshot
from areal_core.controller.core.tables import Place
from areal_core.controller.payloads import PayloadStore
from areal_core.controller.recorder import Recorder
from areal_core.controller.retention import EvaluationSchedule, Retention
from areal_core.controller.snapshots import Snapshots
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.tracking.outbox import Outbox
from areal_core.types import Evaluation, GroupSummary, Outcome, PolicyVersion, Tally
from benchmarks import _harness
from tests.support.records import packed

GROUP, TOKENS = 8, 4096  # completions of a group, and all their tokens
AHEAD = 2  # batches that are buffered
PAYLOAD_BYTES = 13 * TOKENS  # token, log-probability, version and mask of each
EVALUATED_EVERY = 5  # steps
_DROPPED = 10  # one group in so many
_SEGMENT_GROUPS = 2**14  # 64 MiB of payloads
_SUMMARY = GroupSummary(
    **packed((TOKENS // GROUP,) * GROUP, 50, checksums=(2**31,) * 9),
    min_version=0,
    max_version=0,
    outcomes={Outcome.CORRECT: GROUP // 2, Outcome.INCORRECT: GROUP // 2},
)
_STALENESS = {"0": 1000, "1": 11000, "2": 800}

T = TypeVar("T")


class Stopwatch:
    """Longest wall time and CPU time of each call."""

    def __init__(self) -> None:
        self._wall_ms: dict[str, float] = {}
        self._cpu_ms: dict[str, float] = {}

    def __call__(self, name: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        start, cpu = time.perf_counter(), time.thread_time()
        result = call(*arguments, **named)
        took = (self._wall_ms, time.perf_counter() - start), (self._cpu_ms, time.thread_time() - cpu)
        for longest, took_s in took:
            longest[name] = round(max(1000 * took_s, longest.get(name, 0.0)), 2)
        return result

    def found(self) -> dict[str, Any]:
        worst, worst_cpu = (max(one.items(), key=lambda item: item[1]) for one in (self._wall_ms, self._cpu_ms))
        return {
            "longest_call": worst,
            "longest_call_cpu": worst_cpu,
            "longest_ms": self._wall_ms,
            "longest_cpu_ms": self._cpu_ms,
        }


# -- calls on the event loop -----------------------------------------------------------------------------------


def fill(ledger: TrajectoryLedger, groups: int, per_step: int) -> int:
    """Fill a new ledger with this many finished groups; return the last step."""
    database = ledger._db  # a row at a time, its methods would take minutes  # pyright: ignore[reportPrivateUsage]
    summary = msgspec.json.encode(_SUMMARY)
    steps = itertools.count(per_step)
    rows = [(number, None if number % _DROPPED == 0 else next(steps) // per_step) for number in range(1, groups + 1)]
    last = max(step for _, step in rows if step is not None)
    database.execute("BEGIN")
    database.executemany(
        "INSERT INTO groups (group_id, prompt_index, requeues, state, reason, admission, step, tokens, min_version, "
        "max_version, ready_version, summary) VALUES (?1, ?1, 0, IIF(?2 IS NULL, 'dropped', 'consumed'), "
        f"IIF(?2 IS NULL, 'zero_variance', NULL), ?1, ?2, {TOKENS}, ?2 - 1, ?2 - 1, ?2 - 1, ?3)",
        ((number, step, summary) for number, step in rows),
    )
    database.executemany(
        "INSERT INTO payloads VALUES (?, ?, ?, ?, 1)",
        (
            (number, f"000001-{number // _SEGMENT_GROUPS:06d}", number * PAYLOAD_BYTES, PAYLOAD_BYTES)
            for number, step in rows
            if step is not None
        ),
    )
    for version in range(last + 1):
        ledger.versions.put(_version(version))
        ledger.notes.publish(version, float(version))
        ledger.notes.add_staleness(version, _STALENESS)
    database.execute("COMMIT")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no part of what is measured
    return last


def calls(ledger: TrajectoryLedger, first: int, steps: int, per_step: int) -> dict[str, Any]:
    """Make some steps from `first` on, with all methods that the controller calls on its event loop."""
    watch = Stopwatch()
    watch("counters.join", ledger.counters.join, "generation-0", f"url-{first}", 0)
    for step in range(first, first + steps):
        policy = ("admit", "wait", "drop")[step % 3]
        selection = Selection(groups=per_step, rule=policy, max_staleness=AHEAD, max_requeues=1)
        made = replace(_SUMMARY, min_version=step - 1, max_version=step - 1)
        for number in range(per_step):
            place = Place(segment="000002-000001", start=number * PAYLOAD_BYTES, bytes=PAYLOAD_BYTES, crc32=1)
            group_id = watch("admit", ledger.admit, version=step - 1).group_id
            watch("failed_try", ledger.count_failed_attempt, group_id, Tally(tokens=1))
            watch("lose_tokens", ledger.add_lost_tokens, group_id, Tally(tokens=1))
            watch("admitted", lambda: ledger.admitted)
            watch("ready", ledger.ready, group_id, made, place, version=step - 1)
        group_id = watch("admit", ledger.admit, version=step - 1).group_id
        watch("inflight", ledger.inflight)
        watch("settle", ledger.settle, group_id, Tally(tokens=TOKENS))
        watch("drop", ledger.drop, group_id, "reward", requeue=True)
        watch("payloads.forgotten", lambda: ledger.payloads.forgotten)
        fixed = watch("fix_batch", ledger.fix_batch, step, selection)
        assert fixed is not None
        watch("batch", ledger.batch, step - 2)
        watch("summaries", ledger.summaries, step)
        watch("prompt_indices", ledger.prompt_indices, step)
        watch("payload", ledger.payload, fixed.groups[0].group_id)
        watch("step_of", ledger.step_of, fixed.groups[0].group_id)
        watch("publish", ledger.publish, _version(step))
        accounted = watch("counters.accounted", ledger.counters.accounted)
        watch("counters.report", ledger.counters.report, "generation-0", step * TOKENS, accounted)
        watch("tokens", ledger.tokens)
        watch("counts", ledger.counts)
        watch("dropped", ledger.dropped)
        watch("last_step", ledger.last_step)
        watch("versions.newest", ledger.versions.newest)
        watch("versions.get", ledger.versions.get, step - 1)
        watch("notes.published_s", ledger.notes.published_s, step - 1)
        watch("notes.publish", ledger.notes.publish, step, float(step))
        watch("notes.add_staleness", ledger.notes.add_staleness, step, _STALENESS)
        watch("payloads.segments", ledger.payloads.segments)
    places = ledger.payloads.all()
    for _ in range(1000):  # of which some read a page
        watch("payloads.all, a place", next, places, None)
    watch("notes.staleness", ledger.notes.staleness)
    last = first + steps - 1
    watch("publish, other weights", ledger.publish, replace(_version(last), digest="other"))
    batch = ledger.batch(last)
    assert batch is not None
    watch("lose", ledger.drop_damaged, batch.groups[0].group_id)
    watch("resume", ledger.resume, TOKENS)
    return watch.found()


def fold(ledger: TrajectoryLedger, step: int) -> dict[str, Any]:
    """Free and prune the records of all steps up to this one."""
    watch, start, calls_made = Stopwatch(), time.perf_counter(), 1
    while watch("free", ledger.free, step) or watch("fold", ledger.prune):
        ledger.flush()  # in a thread, in a run
        calls_made += 1
    return {**watch.found(), "calls": calls_made, "s": round(time.perf_counter() - start, 1)}


def on_the_loop(groups: int, per_step: int, steps: int = 50) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="areal-growth-") as scratch:
        file, copy = Path(scratch) / "ledger.sqlite", Path(scratch) / "copy.sqlite"
        ledger = TrajectoryLedger(file, group_size=GROUP)
        first = fill(ledger, groups, per_step) + 1
        _harness.tell(f"the ledger holds {groups} groups")
        unfolded = calls(ledger, first, steps, per_step)
        _harness.tell(f"unfolded: {unfolded['longest_call']}")
        before = ledger.tokens().accounted, ledger.admitted
        folding = fold(ledger, ledger.last_step())
        assert (ledger.tokens().accounted, ledger.admitted) == before
        _harness.tell(f"folding: {folding}")
        folded = calls(ledger, ledger.last_step() + 1, steps, per_step)
        snapshot(file, copy, ledger.last_step())
        found = {
            "unfolded": unfolded,
            "folding": folding,
            "folded": {**folded, "rows": ledger._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0]},  # pyright: ignore[reportPrivateUsage]
            "snapshot_bytes": copy.stat().st_size,
        }
        ledger.close()
    return found


# -- uploads ---------------------------------------------------------------------------------------------------


class EmulatedRun:
    """The parts of a controller that write, without servers and trainer."""

    def __init__(self, folder: Path, steps: int, per_step: int) -> None:
        self.config = load(
            {
                "state_dir": str(folder),
                "algorithm": {"group_size": GROUP},
                "rollout": {"batch_size": GROUP * per_step},
                "training": {"steps": steps},
                "evaluation": {"every": EVALUATED_EVERY},
            }
        )
        run = RunDir.create(self.config, RunInfo(run_id="r", model_path="", checkpoint_url=str(folder / "store")))
        self._storage = Storage.open(run.info().checkpoint_url)
        self.ledger = TrajectoryLedger(run.ledger, group_size=GROUP)
        self.ledger.publish(_version(0))
        self._number = run.info().number
        self._payloads = PayloadStore(run.payloads, self._number)
        self._snapshots = Snapshots(run, self._storage, self._payloads, retain=False)
        self._outbox = Outbox(run.outbox, "r")
        self._recorder = Recorder(self.config, self.ledger, self._outbox)
        self._recorder.start_clock()
        schedule = EvaluationSchedule(self.config, self.ledger, self._recorder)
        self._retention = Retention(schedule, self._snapshots, list)
        self._selection = Selection(groups=per_step, rule="admit", max_staleness=AHEAD, max_requeues=1)
        self._stored: set[str] = set()  # segments that checkpoints have uploaded

    async def step(self, step: int) -> None:
        """Sample until the buffer is full again, and train on a batch."""
        wanted = self._selection.groups * (1 + AHEAD if step == 1 else 1)
        places = await asyncio.gather(*(self._payloads.append(os.urandom(PAYLOAD_BYTES)) for _ in range(wanted)))
        failed = self.ledger.admit(version=0).group_id
        self.ledger.settle(failed, Tally(tokens=TOKENS))
        self.ledger.drop(failed, "reward", requeue=True)
        made = replace(_SUMMARY, min_version=step - 1, max_version=step - 1)
        for place in places:
            self.ledger.ready(self.ledger.admit(version=0).group_id, made, place, version=step - 1)
        assert self.ledger.fix_batch(step, self._selection)
        self.ledger.publish(_version(step))
        self._recorder.record_step(step, [])
        self._recorder.record_staleness(step, _STALENESS)
        if step % self.config.evaluation.every == 0:
            digest = _version(step).digest
            self._recorder.record_evaluation(
                Evaluation(
                    version=step, digest=digest, accuracy=0.5, prompts=64, no_result=0, mean_tokens=50.0, wall_s=9.0
                )
            )

    async def checkpoint(self, step: int) -> dict[str, int]:
        """Commit a checkpoint; return the number of uploaded bytes."""
        entries = await self._snapshots.take(step, str(step), 600.0)
        assert entries is not None
        files, shared = (
            {name: checkpoint.FileEntry(**entry) for name, entry in entries[kind].items()}
            for kind in ("files", "shared")
        )
        checkpoint.save(self._storage, step, {}, {}, number=self._number, uploaded=files, shared=shared)
        self._retention.start_pruning()
        await self._retention.wait_until_pruned()
        new = shared.keys() - self._stored
        self._stored = set(shared)
        return {
            "ledger_bytes": sum(entry.bytes for entry in files.values()),
            "payload_bytes": sum(shared[name].bytes for name in new),
        }

    def close(self) -> None:
        self._payloads.close()
        self.ledger.close()
        self._outbox.close()


async def uploads(steps: int, per_step: int) -> dict[str, Any]:
    found: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="areal-growth-") as scratch:
        run = EmulatedRun(Path(scratch), steps, per_step)
        every = run.config.training.checkpoint_every
        for step in range(1, steps + 1):
            await run.step(step)
            if step % every == 0:
                found[step] = await run.checkpoint(step)
            if step % max(1, steps // 10) == 0:
                _harness.tell(f"step {step}: {found.get(step)}")
        run.close()
    early, late = (max(step for step in found if step <= bound) for bound in (max(steps // 10, every), steps))
    return {
        "checkpoint_every": every,
        "at": {step: found[step] for step in (early, late)},
        "growth": round(sum(found[late].values()) / sum(found[early].values()) - 1, 4),
        "largest_ledger_bytes": max(one["ledger_bytes"] for one in found.values()),
    }


def _version(number: int) -> PolicyVersion:
    return PolicyVersion(version=number, path=f"/srv/areal/runs/r/weights/v{number:06d}", digest=f"{number:064x}")


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--groups", type=_harness.positive, default=1_000_000)
    parser.add_argument("--steps", type=_harness.positive, default=10_000)
    parser.add_argument("--groups-per-step", type=_harness.positive, default=32)
    options = parser.parse_args()
    per_step = options.groups_per_step
    _harness.report(
        lambda: {
            **on_the_loop(options.groups, per_step),
            "uploads": asyncio.run(uploads(options.steps, per_step)),
        }
    )


if __name__ == "__main__":
    main()
