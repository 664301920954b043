"""Timelines in the Trace Event Format of Chrome, which Perfetto (ui.perfetto.dev) opens.

Complete events ("ph": "X") with times in microseconds since the run's start; one process of the trace is a run, one
thread of it a process of that run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_core.tracking.timeline import Span
from flows.comparison.measures import in_ring_order


def write_trace(runs: Mapping[str, Sequence[Span]], path: Path, *, time_scale: float = 1.0) -> None:
    """Write the spans of runs, by their names, as one trace; `time_scale` is what a second of them stands for."""
    events: list[dict[str, Any]] = []
    for pid, (name, spans) in enumerate(runs.items(), 1):
        events += _events(pid, name, spans, 1e6 * time_scale)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(pid: int, name: str, spans: Sequence[Span], us: float) -> list[dict[str, Any]]:
    start = min((span.start_s for span in spans), default=0.0)
    processes = sorted({span.process for span in spans}, key=in_ring_order)
    tids = {process: tid for tid, process in enumerate(processes, 1)}
    events = [_metadata("process_name", pid, 0, name)]
    for process, tid in tids.items():
        events.append(_metadata("thread_name", pid, tid, process))
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.kind,
                "cat": span.kind,
                "pid": pid,
                "tid": tids[span.process],
                "ts": round((span.start_s - start) * us, 1),
                "dur": round((span.end_s - span.start_s) * us, 1),
                "args": {} if span.step is None else {"step": span.step},
            }
        )
    return events


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
