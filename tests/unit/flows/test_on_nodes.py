"""What a flow waits for when its run is over."""

from __future__ import annotations

import queue
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest

from areal_core.config.groups import NodesConfig, ProvisionConfig
from areal_core.errors import ProvisionError
from areal_core.storage.lease import LeaseLostError
from flows import on_nodes
from flows.fleet import Fleet, Seen, Stage

CPU = NodesConfig(gpu="none", gpus=0)
_PATIENCE_S = 20.0


class _Task:
    """A task of Prefect's, without Prefect."""

    def with_options(self, name: str) -> _Task:
        return self

    def submit(self, *arguments: Any, body: Any = on_nodes.wait.fn) -> Any:
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        thread.start()
        return MagicMock(wait=thread.join)


class AskedToEndError(BaseException):
    """As Prefect raises it in the main thread where the process is sent SIGTERM."""


@pytest.mark.parametrize(
    ("error", "done"),
    [
        (ProvisionError("no"), ["stop", "close"]),
        (LeaseLostError("lost"), []),  # the shares are somebody else's by now
        (AskedToEndError(), ["hand_over", "stop"]),
    ],
)
def test_what_becomes_of_the_shares_of_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, done: list[str]
) -> None:
    calls = MagicMock()
    calls.stop.return_value = True
    monkeypatch.setattr(on_nodes, "Fleet", MagicMock())
    on_nodes.Fleet.return_value.__exit__.return_value = False  # pyright: ignore[reportAttributeAccessIssue]
    shares = MagicMock(stop=calls.stop, close=calls.close)
    supply = MagicMock(hand_over=calls.hand_over)
    with pytest.raises(type(error)), on_nodes._given_out(MagicMock(), [], shares, supply, print):
        raise error
    assert [call[0] for call in calls.method_calls] == done


@pytest.mark.parametrize(("error", "called"), [(ProvisionError("no"), False), (AskedToEndError(), True)])
def test_the_reaper_is_called_where_the_flow_is_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, called: bool
) -> None:
    reaper = MagicMock()
    monkeypatch.setattr(on_nodes, "_call_the_reaper", reaper)
    monkeypatch.setattr(on_nodes, "get_client", MagicMock())
    with pytest.raises(type(error)), on_nodes._reaped_where_cancelled():
        raise error
    assert reaper.called is called


@pytest.mark.cpu_seconds(10)
def test_a_node_that_does_not_see_the_end_of_its_run_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_nodes, "wait", _Task())
    for name in ("_LOOK_S", "_SEE_S"):
        monkeypatch.setattr(on_nodes, name, 0.01)
    monkeypatch.setattr(on_nodes, "_show_progress", MagicMock())
    config = ProvisionConfig(kind="terraform", image="ami-1", generation=CPU, trainer=CPU)
    work = MagicMock()
    work.give = lambda role, index: f"{role}-{index}"
    work.seen = lambda ids: {each: Seen(Stage.DONE if each == "trainer-0" else Stage.RUNS, None, "") for each in ids}
    progress = MagicMock()
    progress.cancelled_unheard.return_value = False
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def watch(fleet: Fleet) -> None:
        on_nodes._watch(fleet, None, progress, MagicMock(), MagicMock())
        ended.put(None)

    with Fleet(config, [], work, None, restarts=0) as fleet:
        threading.Thread(target=watch, args=(fleet,), daemon=True).start()
        ended.get(timeout=_PATIENCE_S)
        assert not fleet.of("generation")[0].seen.stage.over
