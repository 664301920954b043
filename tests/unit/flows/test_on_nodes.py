"""What a flow waits for when its run is over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from areal_core.config.groups import NodesConfig, ProvisionConfig
from flows import on_nodes
from flows.fleet import Fleet, Seen, Stage

CPU = NodesConfig(gpu="none", gpus=0)
_PATIENCE_S = 20.0


class _Task:
    """A task of Prefect's, without Prefect."""

    def __init__(self, body: Callable[[Fleet], None]) -> None:
        self._body = body

    def submit(self, fleet: Fleet) -> Any:
        thread = threading.Thread(target=self._body, args=(fleet,), daemon=True)
        thread.start()
        return MagicMock(wait=thread.join)


@pytest.mark.cpu_seconds(10)
def test_a_node_that_does_not_see_the_end_of_its_run_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bootstrap", "generate", "train"):
        monkeypatch.setattr(on_nodes, name, _Task(getattr(on_nodes, name).fn))
    for name in ("_LOOK_S", "_SEE_S"):
        monkeypatch.setattr(on_nodes, name, 0.01)
    monkeypatch.setattr(on_nodes, "_show_progress", MagicMock())
    config = ProvisionConfig(kind="terraform", image="ami-1", generation=CPU, trainer=CPU)
    work = MagicMock()
    work.give = lambda role, index: f"{role}-{index}"
    work.seen = lambda ids: {each: Seen(Stage.DONE if each == "trainer-0" else Stage.RUNS, None, "") for each in ids}
    supply, progress = MagicMock(), MagicMock()
    supply.spent.return_value, progress.cancelled_unheard.return_value = None, False
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def watch(fleet: Fleet) -> None:
        on_nodes._watch(fleet, work, supply, progress, MagicMock(), MagicMock())
        ended.put(None)

    with Fleet(config, [], work, None, restarts=0) as fleet:
        threading.Thread(target=watch, args=(fleet,), daemon=True).start()
        ended.get(timeout=_PATIENCE_S)
        assert not fleet.of("generation")[0].seen.stage.over
