"""The evaluator's turns between scores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_core.evaluation import evaluator as module
from areal_core.evaluation import servers
from areal_core.evaluation.evaluator import Evaluator
from areal_core.types import PolicyVersion

VERSION = PolicyVersion(version=1, path="", digest="0" * 64)


def test_a_borrowed_server_is_returned_though_all_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an evaluator that died between its last record and that."""

    async def finished() -> None:
        raise InterruptedError

    monkeypatch.setattr(module, "Collector", lambda *_, **__: SimpleNamespace(over=True, finished=finished))
    borrowed, joined = tmp_path / "borrowed", []
    borrowed.write_text('{"name": "a", "url": "http://a", "stager": null}')
    lent: Any = servers.BorrowedServer.__new__(servers.BorrowedServer)
    lent._file = borrowed
    lent._controller = SimpleNamespace(servers=list, join=lambda name, *_, stager: joined.append(name))
    evaluator: Any = Evaluator.__new__(Evaluator)
    evaluator._run, evaluator.servers = SimpleNamespace(evaluations=tmp_path), lent
    evaluator._benchmark = SimpleNamespace(about={})
    evaluator._tokenizer = evaluator._stop_token_ids = evaluator.rewards = None
    with pytest.raises(InterruptedError):
        asyncio.run(evaluator.score(VERSION))
    assert (joined, borrowed.exists()) == (["a"], False)


def test_a_server_that_is_lost_again_and_again_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector, left = SimpleNamespace(over=False), 3

    async def score(*_: object) -> None:
        nonlocal left
        left -= 1
        collector.over = not left
        raise servers.ServerLostError("it is gone")

    monkeypatch.setattr(servers, "_RETRY_S", 0.0)
    own: Any = servers.OwnServers.__new__(servers.OwnServers)
    own._run, own._role, own._count = SimpleNamespace(ready_info=lambda *_: {"url": ""}), "evaluation", 1
    own._completions, own._score = 1, score
    asyncio.run(own.work_on(collector, VERSION))
    assert caplog.messages == ["it is gone"]
