"""A run at its head node, whose files are served, and other servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from areal_core.launch import logs
from tests.support.remote import HeadNode, Served


@pytest.fixture(autouse=True)
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a log name no step that an earlier test has set."""
    monkeypatch.setattr(logs, "_step", None)


@pytest.fixture
def head_node(tmp_path: Path) -> Iterator[HeadNode]:
    made = HeadNode(tmp_path)
    yield made
    made.end()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[], web.Application]], str]]:
    """Serve an application; returns its URL."""
    served: list[Served] = []

    def start(make: Callable[[], web.Application]) -> str:
        served.append(Served(make))
        return served[-1].url

    yield start
    for one in served:
        one.close()
