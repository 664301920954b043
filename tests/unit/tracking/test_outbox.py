"""The outbox: what wins, what is frozen, and that several processes may use it without MLflow."""

import math
from pathlib import Path

import pytest

from areal_core.errors import TrackingError
from areal_core.tracking import outbox as module
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow


def row(key: str = "reward", step: int = 1, value: float = 0.5, time_s: float = 100.0) -> MetricRow:
    return MetricRow(key=key, step=step, value=value, time_s=time_s)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox.sqlite", "run-1")


def test_rows_come_out_in_order_and_once(outbox: Outbox) -> None:
    rows = [row("b"), row("a"), row("b", 2)]
    outbox.log(rows)
    for expected in (rows[:2], rows[2:], []):
        assert outbox.attempt_metrics(2) == expected
        outbox.settle_metrics(expected)
    assert outbox.unsent() == 0


def test_last_write_wins_until_the_first_attempt(outbox: Outbox) -> None:
    outbox.log([row(value=1.0), row(step=2)])
    outbox.log([row(value=2.0, time_s=101.0)])
    attempted = outbox.attempt_metrics(1)
    outbox.log([row(value=3.0), row(step=0)])
    assert attempted == outbox.attempted_metrics() == [row(value=2.0, time_s=101.0)]
    assert outbox.attempt_metrics(2) == [*attempted, row(step=2)]  # what was attempted comes first again
    outbox.settle_metrics([*attempted, row(step=2)])
    outbox.log([row(value=4.0)])
    assert outbox.unsent() == 1


def test_values_that_are_not_finite_survive(outbox: Outbox) -> None:
    values = [math.nan, math.inf, -math.inf]
    outbox.log([row(step=step, value=value) for step, value in enumerate(values)])
    assert repr([one.value for one in outbox.attempt_metrics(3)]) == repr(values)


def test_keys_that_mlflow_refuses_are_refused(outbox: Outbox) -> None:
    for key in ("", "a:b", "a//b", "/a", "../a", "a/", "a\nb", "é" * 251):
        with pytest.raises(TrackingError, match="metric key"):
            outbox.log([row("fine"), row(key)])
    assert outbox.unsent() == 1  # a refused key costs its own point alone
    for key in ("a", "time/step_s", "rollout/staleness-mean 0.5", "é" * 250):
        outbox.log([row(key)])
    assert outbox.unsent() == 1 + 4


def test_runs_do_not_see_each_other(outbox: Outbox, tmp_path: Path) -> None:
    other = Outbox(tmp_path / "outbox.sqlite", "run-2")
    outbox.log([row()])
    outbox.end("KILLED")
    assert (other.attempt_metrics(10), other.ended(), outbox.ended()) == ([], None, "KILLED")
    outbox.reopen()
    assert outbox.ended() is None


def test_documents_are_replaced_until_equal(outbox: Outbox) -> None:
    outbox.document("staleness_histogram", 5, {"counts": {"0": 1}})
    sending = outbox.pending_document()
    assert sending is not None
    outbox.document("staleness_histogram", 5, {"counts": {"0": 2}})
    outbox.settle_document(sending)
    replaced = outbox.pending_document()
    assert replaced is not None
    assert replaced.data == {"counts": {"0": 2}}
    outbox.settle_document(replaced)
    outbox.document("staleness_histogram", 5, {"counts": {"0": 2}})
    assert outbox.pending_document() is None


def test_what_was_sent_takes_no_room(outbox: Outbox, tmp_path: Path) -> None:
    for step in range(20):
        outbox.document("trajectories", step, {"rows": ["x" * 100_000]})
        document = outbox.pending_document()
        assert document is not None
        outbox.settle_document(document)
    outbox.close()
    assert (tmp_path / "outbox.sqlite").stat().st_size < 500_000


def test_full_outbox_takes_points_and_no_tables(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", 4 << 20)
    outbox.log(row(key, step) for key in ("a", "b") for step in range(20_000))  # as many bytes, which do not matter
    for step in range(42):
        outbox.document("trajectories", step, {"rows": ["x" * 100_000]})
    with pytest.raises(TrackingError, match=r"^document trajectories: 4 MiB of documents are queued; "):
        outbox.document("trajectories", 42, {"rows": []})
    outbox.log([row()])
    outbox.document("summary", 1, {})
    while document := outbox.pending_document():
        outbox.settle_document(document)
    outbox.document("trajectories", 42, {"rows": []})


def test_unknown_document_and_unusable_path_are_refused(outbox: Outbox, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="document kind 'picture': must be one of dataset_report, evaluation, "):
        outbox.document("picture", 1, {})
    with pytest.raises(TrackingError, match="can't open the outbox"):
        Outbox(tmp_path / "absent" / "outbox.sqlite", "run-1")
