"""Engines whose requests are served to their ends, without a server."""

from __future__ import annotations

from collections.abc import Iterable

from areal_core.generation.engines.embedded import Engine
from areal_core.generation.engines.engine import Generation
from areal_core.types import Completion, GenerationRequest


class OfflineEngine(Engine):
    """The embedded engine, with a call that serves requests."""

    def generate(self, requests: Iterable[GenerationRequest]) -> list[list[Completion]]:
        """Serve requests to their end; returns their completions in the order of the requests."""
        ids: list[str] = []
        for request in requests:
            self.add(request)
            ids.append(request.request_id)
        ended: list[Generation] = []
        while self.running or self.waiting:
            ended += self.step()
        finished = gathered(ended)
        return [finished[request_id] for request_id in ids]


def gathered(generations: Iterable[Generation]) -> dict[str, list[Completion]]:
    """The completions of requests that were generated to their ends, in order, by request id."""
    found: dict[str, dict[int, Completion]] = {}
    for generation in generations:
        found.setdefault(generation.request.request_id, {}).update(generation.completions)
    return {request_id: [ended[index] for index in range(len(ended))] for request_id, ended in found.items()}
