"""Traces are what Chrome and Perfetto read."""

import json
from pathlib import Path

from areal_core.tracking.timeline import Span
from flows.comparison.trace import write_trace


def test_events_are_complete_named_and_relative_to_their_run(tmp_path: Path) -> None:
    runs = {
        "t-sync-s1": [
            Span(process="trainer-0", kind="train", start_s=1000.5, end_s=1002.0, step=7),
            Span(process="generation-0", kind="generate", start_s=1000.0, end_s=1000.25),
        ],
        "t-sync-s2": [Span(process="trainer-0", kind="publish", start_s=5000.0, end_s=5000.1, step=1)],
    }
    write_trace(runs, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", 1, 0, "t-sync-s1"),
        ("thread_name", 1, 1, "generation-0"),
        ("thread_name", 1, 2, "trainer-0"),
        ("process_name", 2, 0, "t-sync-s2"),
        ("thread_name", 2, 1, "trainer-0"),
    ]
    done = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert done == [
        ("train", 1, 2, 500_000.0, 1_500_000.0, {"step": 7}),
        ("generate", 1, 1, 0.0, 250_000.0, {}),
        ("publish", 2, 1, 0.0, 100_000.0, {"step": 1}),
    ]
    assert {e["ph"] for e in events} == {"M", "X"}


def test_times_are_those_of_the_emulated_cluster(tmp_path: Path) -> None:
    spans = [Span(process="trainer-0", kind="train", start_s=10.0 + start, end_s=10.5 + start) for start in (0, 1)]
    write_trace({"r": spans}, tmp_path / "trace.json", time_scale=100.0)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [(0.0, 50e6), (100e6, 50e6)]
