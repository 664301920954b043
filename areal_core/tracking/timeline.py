"""Timelines: timed spans of activities of a run's processes, for plots and the bottleneck report.

Each process has one file, `<run folder>/timeline/<process>.jsonl`, with one span per line. Time outside of spans is
start-up or very short work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KINDS = ("generate", "wait", "update", "recompute", "train", "score", "publish", "checkpoint", "evaluate")
_SHORTEST_S = 5e-4  # shorter spans are invisible in plots, and may be many


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One activity of one process."""

    process: str  # generation-0, trainer-1, rewards-0, evaluator-0
    kind: str  # one of KINDS
    start_s: float  # since the epoch
    end_s: float
    step: int | None = None  # its training step, or the version that was scored
    cpu_s: float | None = None  # CPU time of the process since its previous span; None: not measured

    @property
    def role(self) -> str:
        return self.process.rpartition("-")[0]


class TimelineWriter:
    """Appends the spans of the process named in `path`. Times are `time.monotonic()` of this machine.

    `cpu` returns the CPU seconds that the process has used so far. CPU time before construction belongs to no span.
    """

    def __init__(self, path: Path, *, cpu: Callable[[], float] | None = None) -> None:
        self._file = path.open("a", buffering=1)
        self._epoch_s = time.time() - time.monotonic()
        self._cpu = cpu
        self._counted_s = 0.0 if cpu is None else cpu()

    def span(self, kind: str, start_s: float, end_s: float, step: int | None = None) -> None:
        assert kind in KINDS, kind
        if end_s - start_s < _SHORTEST_S:
            return
        cpu_s = None
        if self._cpu is not None:
            now = self._cpu()
            cpu_s, self._counted_s = round(now - self._counted_s, 6), now
        self._file.write(json.dumps([kind, start_s + self._epoch_s, end_s + self._epoch_s, step, cpu_s]) + "\n")


class Activity:
    """The present activity of a process, one of KINDS, and the seconds spent on each kind."""

    def __init__(
        self, kind: str, timeline: TimelineWriter | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._timeline = timeline
        self._since = self._marked = clock()
        self.kind = kind
        self._seconds: dict[str, float] = {}

    def note(self, kind: str) -> None:
        """Switch to the activity `kind`."""
        now = self._clock()
        self._seconds[self.kind] = self._seconds.get(self.kind, 0.0) + now - self._marked
        self._marked = now
        if kind != self.kind:
            if self._timeline is not None:
                self._timeline.span(self.kind, self._since, now)
            self.kind, self._since = kind, now

    def seconds(self, kind: str) -> float:
        """Seconds spent on `kind`, up to the last `note`."""
        return self._seconds.get(kind, 0.0)

    def end(self) -> None:
        """Write the current span, which is the last."""
        if self._timeline is not None:
            self._timeline.span(self.kind, self._since, self._clock())


def read_timeline(folder: Path) -> list[Span]:
    """All spans of a run, sorted by start time.
    Skips lines that are incomplete because a process was killed or the power failed."""
    spans: list[Span] = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(errors="replace").splitlines():
            try:
                kind, start_s, end_s, step, cpu_s = json.loads(line)
            except ValueError:
                continue
            spans.append(Span(process=file.stem, kind=kind, start_s=start_s, end_s=end_s, step=step, cpu_s=cpu_s))
    return sorted(spans, key=lambda span: span.start_s)
