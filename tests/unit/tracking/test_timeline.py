"""Spans survive the process that wrote them, in order, whole."""

import time
from pathlib import Path

from areal_core.tracking.timeline import Activity, Span, TimelineWriter, read_timeline


def test_spans_of_all_processes_come_back_by_their_start(tmp_path: Path) -> None:
    server, trainer = (TimelineWriter(tmp_path / f"{name}.jsonl") for name in ("generation-0", "trainer-1"))
    now, epoch_s = time.monotonic(), time.time()
    trainer.span("train", now - 3.0, now - 1.0, 7)
    server.span("generate", now - 4.0, now - 2.0)
    server.span("wait", now, now + 1e-6)  # too short to be seen
    spans = read_timeline(tmp_path)
    assert [(span.process, span.kind, span.step) for span in spans] == [
        ("generation-0", "generate", None),
        ("trainer-1", "train", 7),
    ]
    assert abs(spans[0].start_s - (epoch_s - 4.0)) < 0.1
    assert abs(spans[1].end_s - spans[1].start_s - 2.0) < 1e-6


def test_a_restarted_process_goes_on_in_its_file_and_half_a_line_is_no_span(tmp_path: Path) -> None:
    for start in (1.0, 2.0):
        TimelineWriter(tmp_path / "trainer-0.jsonl").span("train", start, start + 0.5)
    with (tmp_path / "trainer-0.jsonl").open("a") as file:
        file.write('["train", 3.0, 3.')
        file.write('["wait", 4.0, 5.0, 1, null]\n' + "\0" * 9 + "]\n")  # as a disk without power leaves it
        file.write('["train", 6.0')
    assert [span.kind for span in read_timeline(tmp_path)] == ["train", "train"]
    assert isinstance(read_timeline(tmp_path)[0], Span)
    assert read_timeline(tmp_path / "nothing") == []


def test_a_span_holds_the_cpu_seconds_since_the_one_before(tmp_path: Path) -> None:
    used = iter([1.0, 1.5, 4.0])  # at the start: what was used by then counts in no span
    writer = TimelineWriter(tmp_path / "trainer-0.jsonl", cpu=lambda: next(used))
    writer.span("train", 1.0, 2.0)
    writer.span("wait", 2.0, 2.0001)  # too short to be seen, so what it used goes to the next one
    writer.span("train", 3.0, 9.0)
    assert [span.cpu_s for span in read_timeline(tmp_path)] == [0.5, 2.5]


def test_an_activity_is_one_thing_at_a_time(tmp_path: Path) -> None:
    now = [10.0]
    doing = Activity("wait", TimelineWriter(tmp_path / "generation-0.jsonl"), clock=lambda: now[0])
    for second, kind in ((11.0, "generate"), (12.0, "generate"), (14.0, "update"), (15.0, "generate")):
        now[0] = second
        doing.note(kind)
    now[0] = 17.0
    assert [doing.seconds(kind) for kind in ("wait", "generate", "update")] == [1.0, 3.0, 1.0]  # up to the last note
    doing.end()
    spans = [(span.kind, round(span.end_s - span.start_s, 6)) for span in read_timeline(tmp_path)]
    assert spans == [("wait", 1.0), ("generate", 3.0), ("update", 1.0), ("generate", 2.0)]
