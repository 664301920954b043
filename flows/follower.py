"""What a node of a run does that is not the head node: a share of it, beside a copy of its folder.

Where the head node is lost, the share waits for another one, which goes on from the newest checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from areal_core.api.head import AwayError
from areal_core.config.schema import RunConfig
from areal_core.errors import ProcessError
from areal_core.run.remote_worker import CopiedFolder, Head, RemoteWorker, RunLostError, Share
from flows import whereabouts
from flows.notice import Notice
from flows.provision.request import servers_per_node

_HEAD_S = 1800.0  # for a head node to come up, also for another one in its place: nodes take their time
_LOOK_S = 2.0

Log = Callable[[str], None]


def follow(config: RunConfig, run_id: str, role: str, index: int, address: str, log: Log, notice: Notice) -> None:
    """Until the run has ended in order, or this node has left it. Raises ProcessError and others."""
    log("waiting for the head node")
    where = _Where(run_id)
    head = Head(where, where.token())
    per_node = servers_per_node(config)
    share = (
        Share(role=role, first=index * per_node, count=per_node)
        if role == "generation"
        else Share(role=role, first=index)
    )
    folder = Path(config.state_dir).absolute() / "copies" / f"{role}-{index}"
    while notice.text() is None:
        worker = RemoteWorker(share, CopiedFolder(head, folder), address, log=log)
        notice.heed(worker.leave)
        try:
            worker.work(_HEAD_S)
            return
        except RunLostError as error:
            log(f"waiting for another head node: {error}")


class _Where:
    """Where the head node is, as Prefect knows it; where it was, while Prefect is away."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._known: whereabouts.Whereabouts | None = None

    def __call__(self) -> str:
        try:
            self._known = whereabouts.ask(self._run_id) or self._known
        except httpx.HTTPError as error:
            if self._known is None:
                raise AwayError(f"Prefect's server does not say where the head node is: {error}") from None
        if self._known is None:
            raise AwayError("there is no head node yet")
        return self._known.url

    def token(self) -> str:
        """The run's, which every head node of it has. Raises ProcessError where none comes up."""
        deadline = time.monotonic() + _HEAD_S
        while True:
            try:
                self()
                break
            except AwayError as error:
                if time.monotonic() > deadline:
                    raise ProcessError(f"no head node has come up in {_HEAD_S:.0f} s: {error}") from None
            time.sleep(_LOOK_S)
        assert self._known is not None
        return self._known.token
