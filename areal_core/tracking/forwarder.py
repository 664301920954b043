"""The forwarder: sends the contents of the outbox to MLflow.

Every point arrives exactly once. The forwarder marks a batch as attempted, sends it and marks it as sent. After a
failure or a restart it first compares the attempted points with the histories on the server. A server outage stops
nothing: points wait in the outbox. A rejected batch is sent again in smaller parts, until the rejected point is alone
and is set aside.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from areal_core.tracking.mlflow_client import (
    FAILURES,
    MAX_METRICS,
    Metric,
    MlflowClient,
    append_note,
    put_table,
    reason,
    refuses,
    shown,
)
from areal_core.tracking.outbox import Document, Outbox
from areal_core.types import MetricRow

_INTERVAL_S = 1.0  # between two reads of the outbox
_MAX_BACKOFF_S = 5.0
_REQUEST_S = 5  # time limit of one request
_STOP_S = 2  # for sending the rest when the process is stopped; also the limit of each request then
_FINAL_METRICS = (
    "accuracy_before",
    "accuracy_after",
    "best_accuracy",
    "rl_wall_s",
    "time_to_score_s",
    "effective_tokens_per_s",
    "generated_tokens_per_s",
    "staleness_mean",
    "staleness_max",
)
_log = logging.getLogger(__name__)


class Forwarder:
    """Sends the contents of an outbox to one MLflow run, and ends that run."""

    def __init__(self, outbox: Outbox, uri: str, run_id: str, flush_timeout_s: float = 60.0) -> None:
        self._outbox = outbox
        self._client = MlflowClient(uri)
        self._uri = uri
        self._run_id = run_id
        self._flush_timeout_s = flush_timeout_s
        self._opened = False
        self._must_compare = True  # the server may hold points that are only marked as attempted
        self._size = MAX_METRICS  # points in the next request

    def run(self, wait: Callable[[float], bool]) -> bool:
        """Forward until the outbox has ended and is sent, or `flush_timeout_s` after its end; returns True.

        `wait(seconds)` returns early with True when the process is stopped. Then the forwarder spends a few more
        seconds on sending. It marks the run as KILLED, unless the outbox has ended otherwise, and returns False.
        """
        failures = 0
        give_up_at = math.inf
        while True:
            ended = self._outbox.ended()  # read first: nothing is added to an ended outbox
            if ended:
                give_up_at = min(give_up_at, time.monotonic() + self._flush_timeout_s)
            left_s = give_up_at - time.monotonic()
            _limit_requests(min(_REQUEST_S, left_s))
            try:
                waiting = self._send_some()
                if ended and not waiting:
                    self._client.set_terminated(self._run_id, ended)
                    return True
                if failures:
                    _log.info("tracking: %s responds again", shown(self._uri))
                failures = 0
                pause = 0.0 if waiting else _INTERVAL_S
            except FAILURES as error:
                if not failures:
                    _log.warning("tracking: %s fails, metrics are queued: %s", shown(self._uri), reason(error))
                failures += 1
                pause = min(_INTERVAL_S * failures, _MAX_BACKOFF_S)
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                _log.warning(
                    "tracking: gave up after %g s (tracking.flush_timeout_s) with %d items unsent; "
                    "`python -m areal_core.tracking` on the run's folder sends them later",
                    self._flush_timeout_s,
                    self._outbox.unsent(),
                )
                return True
            if wait(min(pause, left_s)):
                self._stop()
                return False

    def _stop(self) -> None:
        """Try to send the rest for a few seconds, then record the run's end, even if sending fails."""
        _limit_requests(_STOP_S)
        deadline = time.monotonic() + _STOP_S
        try:
            while self._send_some() and time.monotonic() < deadline:
                pass
        except FAILURES as error:
            _log.warning("tracking: %d items were not sent: %s", self._outbox.unsent(), reason(error))
        status = self._outbox.ended() or "KILLED"
        try:
            self._client.set_terminated(self._run_id, status)
        except FAILURES as error:
            _log.warning("tracking: can't mark the run as %s: %s", status, reason(error))

    def _send_some(self) -> bool:
        """Send at most one batch of points and one document; returns whether more items wait."""
        if not self._opened:
            if self._outbox.ended() is None and self._client.get_run(self._run_id).info.status != "RUNNING":
                self._client.update_run(self._run_id, status="RUNNING")  # an earlier launcher had ended it
            self._opened = True
        self._send_metrics()
        self._send_document()
        return self._outbox.unsent() > 0

    def _send_metrics(self) -> None:
        if self._must_compare:
            self._compare()
        rows = self._outbox.attempt_metrics(self._size)
        if not rows:
            return
        self._must_compare = True
        points = [Metric(row.key, row.value, int(row.time_s * 1000), row.step) for row in rows]
        refusal = self._refusal(lambda: self._client.log_batch(self._run_id, metrics=points, synchronous=True))
        # Halving the batch isolates a rejected point.
        self._size = min(MAX_METRICS, 2 * self._size) if refusal is None else max(1, len(rows) // 2)
        if refusal is None or len(rows) == 1:
            self._outbox.settle_metrics(rows)
            self._log_refusal(f"point {rows[0].key} of step {rows[0].step}", refusal)
        self._must_compare = False  # the server does not hold points that it rejected

    def _compare(self) -> None:
        """Mark the points that the server already holds as sent."""
        rows = self._outbox.attempted_metrics()
        for key in {row.key for row in rows}:
            held = {metric.step for metric in self._client.get_metric_history(self._run_id, key)}
            self._outbox.settle_metrics(row for row in rows if row.key == key and row.step in held)
        self._must_compare = False

    def _refusal(self, send: Callable[[], object]) -> str | None:
        """Call `send`; returns the reason if the server rejects the data, else None.
        Raises FAILURES if the outcome is unknown, and for a deleted run, which accepts nothing until restored."""
        try:
            send()
        except FAILURES as error:
            if not refuses(error) or self._client.get_run(self._run_id).info.lifecycle_stage == "deleted":
                raise
            return reason(error)
        return None

    def _log_refusal(self, what: str, refusal: str | None) -> None:
        if refusal is not None:
            _log.warning("tracking: %s rejected %s, skipped: %s", shown(self._uri), what, refusal)

    def _send_document(self) -> None:
        """Send the oldest document. A document overwrites its earlier copy, so sending one twice is harmless."""
        document = self._outbox.pending_document()
        if document is None:
            return
        refusal = self._refusal(lambda: self._put_document(document))
        self._outbox.settle_document(document)
        self._log_refusal(f"document {document.kind} of step {document.step}", refusal)

    def _put_document(self, document: Document) -> None:
        if document.kind == "trajectories":
            put_table(self._client, self._run_id, f"trajectories/step-{document.step:06d}.json", document.data["rows"])
        elif document.kind == "evaluation":
            self._put_scored(document)
        elif document.kind == "staleness_histogram":
            figure = staleness_figure(document.data["counts"], document.step)
            self._client.log_figure(self._run_id, figure, f"staleness/step-{document.step:06d}.png")
        else:
            self._client.log_dict(self._run_id, document.data, f"{document.kind}.json")
        if document.kind == "summary":
            self._outbox.log(_final_rows(document))
            if bound := document.data.get("bound"):
                append_note(self._client, self._run_id, bound)

    def _put_scored(self, document: Document) -> None:
        """Send an evaluation as a table. If its file is missing or damaged, only the table is missing."""
        try:
            rows = json.loads(Path(document.data["file"]).read_text())
        except (OSError, ValueError) as error:
            _log.warning("tracking: can't send the evaluation table of version %d: %s", document.step, error)
            return
        put_table(self._client, self._run_id, f"heldout/version-{document.step:06d}.json", rows)


def _limit_requests(seconds: float) -> None:
    """Set the time limit of each later request of MLflow's client, in whole seconds."""
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, math.ceil(seconds)))


def staleness_figure(counts: Mapping[str, int], step: int) -> Figure:
    """Bar chart of the staleness of consumed tokens. `counts`: staleness in versions -> tokens."""
    tokens = {int(lag): count for lag, count in counts.items() if count}
    total = sum(tokens.values())
    lags = range(min(tokens, default=0), max(tokens, default=0) + 1)
    shares = [tokens.get(lag, 0) / max(total, 1) for lag in lags]
    mean = sum(lag * share for lag, share in zip(lags, shares, strict=True))

    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.bar(lags, shares, width=0.7)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("staleness (policy versions behind the trainer)")
    axes.set_ylabel("share of consumed tokens")
    axes.set_title(f"Staleness at step {step}: mean {mean:.2f}, max {lags[-1]}, {total:,} tokens", fontsize=10)
    return figure


def _final_rows(summary: Document) -> Iterator[MetricRow]:
    for field in _FINAL_METRICS:
        value = summary.data.get(field)
        if value is not None:
            yield MetricRow(key=f"final/{field}", step=summary.step, value=float(value), time_s=summary.time_s)
