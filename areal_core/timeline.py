"""Who did what and when: spans that the processes of a run write down, for pictures and traces of it.

One file a process, `<run folder>/timeline/<process>.jsonl`, one span a line. What is not in a span is start-up or work
too short to be seen.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

KINDS = ("generate", "wait", "update", "recompute", "train", "publish", "checkpoint", "evaluate")
_SHORTEST_S = 5e-4  # what is shorter can't be seen, and there may be a lot of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one process did."""

    process: str  # generation-0, trainer-1, evaluator-0
    kind: str  # one of KINDS
    start_s: float  # since the epoch
    end_s: float
    step: int | None = None  # the training step that it was for, or the version that was scored


class TimelineWriter:
    """Appends the spans of the process that `path` is named after. Times are `time.monotonic()` of this machine."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._epoch_s = time.time() - time.monotonic()

    def span(self, kind: str, start_s: float, end_s: float, step: int | None = None) -> None:
        assert kind in KINDS, kind
        if end_s - start_s >= _SHORTEST_S:
            self._file.write(json.dumps([kind, start_s + self._epoch_s, end_s + self._epoch_s, step]) + "\n")


def read_timeline(folder: Path) -> list[Span]:
    """All spans of a run, by their start. A last line that a killed process left unfinished is no span."""
    spans: list[Span] = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.startswith("[") and line.endswith("]\n"):
                kind, start_s, end_s, step = json.loads(line)
                spans.append(Span(process=file.stem, kind=kind, start_s=start_s, end_s=end_s, step=step))
    return sorted(spans, key=lambda span: span.start_s)
