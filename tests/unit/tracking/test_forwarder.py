"""The forwarder against a stand-in for MLflow's client that fails where a test wants it to.

Against a real server: tests/integration/test_tracking.py.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from requests import HTTPError, Response

from areal_core.tracking import forwarder as module
from areal_core.tracking.forwarder import Forwarder, staleness_figure
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow


class Server:
    """MlflowClient's methods that the forwarder uses. `failures` are spent before or after a batch is stored."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int, float, int]] = []  # key, step, value, timestamp in ms
        self.tags: dict[str, str] = {}
        self.artifacts: dict[str, Any] = {}
        self.status = "RUNNING"
        self.fail_before = 0
        self.fail_after = 0
        self.batches: list[int] = []
        self.refused: set[Any] = set()  # steps of points, paths of artifacts
        self.stage = "active"

    def log_batch(self, run_id: str, metrics: Any, synchronous: bool) -> None:
        if self.fail_before:
            self.fail_before -= 1
            raise MlflowException("down")
        if self.refused & {metric.step for metric in metrics} or self.stage == "deleted":
            raise MlflowException("can't take that", INVALID_PARAMETER_VALUE)
        self.batches.append(len(metrics))
        self.points += [(m.key, m.step, m.value, m.timestamp) for m in metrics]
        if self.fail_after:
            self.fail_after -= 1
            raise ConnectionResetError(104, "Connection reset by peer")

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [SimpleNamespace(step=step) for name, step, _, _ in self.points if name == key]

    def get_run(self, run_id: str) -> Any:
        data = SimpleNamespace(tags=dict(self.tags))
        return SimpleNamespace(info=SimpleNamespace(status=self.status, lifecycle_stage=self.stage), data=data)

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.tags[name] = value

    def log_text(self, run_id: str, text: str, path: str) -> None:
        self.artifacts[path] = text

    def log_dict(self, run_id: str, values: Any, path: str) -> None:
        if path in self.refused:
            response = Response()
            response.status_code = 413
            raise HTTPError("413 Request Entity Too Large", response=response)
        self.artifacts[path] = values

    log_figure = log_text

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    set_terminated = update_run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(module, "MlflowClient", lambda uri: server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # restored afterwards: the forwarder shortens it
    return server


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox.sqlite", "run")


def rows(steps: range, key: str = "reward") -> list[MetricRow]:
    return [MetricRow(key=key, step=step, value=step / 2, time_s=1000 + step) for step in steps]


def stop_at(call: int, also: Callable[[], None] = lambda: None) -> Callable[[float], bool]:
    calls = iter(range(1, call + 1))

    def wait(seconds: float) -> bool:
        if next(calls) < call:
            return False
        also()
        return True

    return wait


def forward(
    outbox: Outbox, wait: Callable[[float], bool] = lambda seconds: False, flush_timeout_s: float = 60.0
) -> bool:
    return Forwarder(outbox, "http://user:secret@host", "id", flush_timeout_s).run(wait)


def test_all_is_sent_and_the_run_ends(server: Server, outbox: Outbox) -> None:
    outbox.log(rows(range(2500)))
    outbox.end("FAILED")
    assert forward(outbox)
    assert server.points == [("reward", step, step / 2, (1000 + step) * 1000) for step in range(2500)]
    assert server.batches == [1000, 1000, 500]
    assert server.status == "FAILED"


@pytest.mark.parametrize("moment", ["fail_before", "fail_after"])
def test_failures_leave_no_gap_and_no_double(server: Server, outbox: Outbox, moment: str) -> None:
    outbox.log(rows(range(12)))
    outbox.end("FINISHED")
    setattr(server, moment, 2)
    assert forward(outbox)
    assert [point[1] for point in server.points] == list(range(12))


@pytest.mark.parametrize("bad", [{0}, {9}, {3, 4, 8}, set(range(10))], ids=["first", "last", "some", "all"])
def test_point_that_the_server_refuses_costs_only_itself(
    server: Server, outbox: Outbox, bad: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    outbox.log(rows(range(10)))
    outbox.end("FINISHED")
    server.refused = bad
    assert forward(outbox)
    assert [point[1] for point in server.points] == [step for step in range(10) if step not in bad]
    for step in bad:
        assert f"rejected point reward of step {step}, skipped: can't take that" in caplog.text
    assert server.status == "FINISHED"


def test_document_that_the_server_refuses_costs_only_itself(
    server: Server, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.document("dataset_report", 0, {"rows": 3})
    outbox.document("summary", 0, {"reason": "steps"})
    outbox.end("FINISHED")
    server.refused = {"dataset_report.json"}
    assert forward(outbox)
    assert server.artifacts == {"summary.json": {"reason": "steps"}}
    assert "document dataset_report of step 0, skipped: 413 Request Entity Too Large" in caplog.text


def test_points_wait_while_their_run_is_deleted(server: Server, outbox: Outbox) -> None:
    outbox.log(rows(range(10)))
    server.stage = "deleted"
    assert not forward(outbox, stop_at(3))
    assert outbox.unsent() == 10
    server.stage = "active"
    assert not forward(outbox, stop_at(1))
    assert [point[1] for point in server.points] == list(range(10))


class Killed(BaseException):
    """SIGKILL, between two instructions."""


class Mortal:
    """Calls of `target`: a process that dies once `lives` is used up, before a call or after it."""

    def __init__(self, target: Any, lives: list[int]) -> None:
        self._target = target
        self._lives = lives

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            self._live()
            result = getattr(self._target, name)(*values, **named)
            self._live()
            return result

        return call

    def _live(self) -> None:
        self._lives[0] -= 1
        if self._lives[0] < 0:
            raise Killed


def test_no_gap_and_no_double_wherever_the_forwarder_is_killed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_METRICS", 4)
    reached_the_end, moment = False, 0
    while not reached_the_end:
        outbox, server = Outbox(tmp_path / f"{moment}.sqlite", "run"), Server()
        server.refused = {6}
        outbox.log(rows(range(10)))
        outbox.document("dataset_report", 0, {"rows": 3})
        outbox.end("FINISHED")
        lives = [moment]
        monkeypatch.setattr(module, "MlflowClient", lambda uri, its=(server, lives): Mortal(*its))
        dying: Any = Mortal(outbox, lives)
        with contextlib.suppress(Killed):
            reached_the_end = forward(dying)
        monkeypatch.setattr(module, "MlflowClient", lambda uri, its=server: its)

        assert forward(outbox)

        assert sorted(point[1] for point in server.points) == [0, 1, 2, 3, 4, 5, 7, 8, 9]
        assert server.artifacts == {"dataset_report.json": {"rows": 3}}
        assert (outbox.unsent(), server.status) == (0, "FINISHED")
        outbox.close()
        moment += 1
    assert moment > 40  # calls, of either, that the whole takes


def test_status_follows_the_run(server: Server, outbox: Outbox) -> None:
    server.status = "KILLED"
    seen: list[str] = []
    assert not forward(outbox, stop_at(1, lambda: seen.append(server.status)))
    assert (seen, server.status) == (["RUNNING"], "KILLED")  # it goes on, and is stopped
    assert not forward(outbox, stop_at(1, lambda: outbox.end("FINISHED")))
    assert server.status == "FINISHED"


def test_server_that_stays_down_is_given_up(server: Server, outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    server.fail_before = 10**9
    outbox.log(rows(range(3)))
    outbox.end("FINISHED")
    assert forward(outbox, flush_timeout_s=1e-9)
    assert "with 3 items unsent" in caplog.text
    assert "secret" not in caplog.text
    assert outbox.unsent() == 3


def test_documents_become_artifacts(
    server: Server, outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scores of a version a table, if their file is there."""
    (tmp_path / "v5.json").write_text('[{"problem": 0, "gold": "7"}]')
    for version in (5, 10):
        outbox.document("evaluation", version, {"file": str(tmp_path / f"v{version}.json")})
    outbox.document("dataset_report", 0, {"rows": 3})
    outbox.document(
        "trajectories", 10, {"rows": [{"reward": 1.0, "completion": "#3"}, {"completion": "#4", "tokens": 2}]}
    )
    outbox.document("trajectories", 5, {"rows": []})
    outbox.document("staleness_histogram", 10, {"counts": {"0": 3, "2": 1}})
    outbox.document(
        "summary", 35, {"accuracy_after": 0.8, "time_to_score_s": None, "reason": "steps", "bound": "Cores."}
    )
    outbox.end("FINISHED")
    assert forward(outbox)
    assert server.artifacts["dataset_report.json"] == {"rows": 3}
    assert json.loads(server.artifacts["trajectories/step-000010.json"]) == {
        "columns": ["reward", "completion", "tokens"],
        "data": [[1.0, "#3", None], [None, "#4", 2]],
    }
    assert [entry["path"] for entry in json.loads(server.tags["mlflow.loggedArtifacts"])] == [
        "heldout/version-000005.json",
        "trajectories/step-000010.json",
        "trajectories/step-000005.json",
    ]
    table = json.loads(server.artifacts["heldout/version-000005.json"])
    assert table == {"columns": ["problem", "gold"], "data": [[0, "7"]]}
    assert "the evaluation table of version 10" in caplog.text
    assert "staleness/step-000010.png" in server.artifacts
    assert server.artifacts["summary.json"]["reason"] == "steps"
    assert server.tags["mlflow.note.content"] == "Cores."  # on top of the run's page
    assert [point[:3] for point in server.points] == [("final/accuracy_after", 35, 0.8)]


def test_list_of_tables_stays_within_a_tag(server: Server, outbox: Outbox) -> None:
    for step in range(80):
        outbox.document("trajectories", step, {"rows": [{"reward": 1.0}]})
    outbox.end("FINISHED")
    assert forward(outbox)
    listed = server.tags["mlflow.loggedArtifacts"]
    assert len(listed) < 8000
    assert json.loads(listed)[-1]["path"] == "trajectories/step-000079.json"


@pytest.mark.parametrize(
    "counts", [{}, {"0": 0}, {"0": 5, "4": 0}, {"3": 1, "11": 2}, {str(lag): 1 for lag in range(40)}]
)
def test_staleness_figure_draws_shares(counts: dict[str, int]) -> None:
    figure = staleness_figure(counts, 10)
    heights = [bar.get_height() for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert sum(heights) == pytest.approx(1.0 if sum(counts.values()) else 0.0)
    highest = max((int(lag) for lag, count in counts.items() if count), default=0)
    assert f"max {highest}, {sum(counts.values()):,} tokens" in figure.axes[0].get_title()
