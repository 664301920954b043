"""Read the trajectories that a rank trains on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from areal_core.api.controller_client import ControllerClient
from areal_core.api.head import Head, HeadNodeError, Session
from areal_core.api.scored_groups import Span, cut, in_segment, read_group, read_group_file, spans_text
from areal_core.errors import ProcessError, StorageError
from areal_core.storage.rundir import RunDir
from areal_core.types import BatchGroup, GroupPayload

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # seconds without the data server, or for the next part of its response
_RETRY_S = 0.2  # between two tries


class Trajectories:
    """Reads payloads of groups, which are parts of segments. Use it from one thread at a time.

    On the head node a rank reads them in the run's folder. On other machines it asks the data server. For damaged or
    missing payloads it asks the controller, which can have them made again.
    """

    def __init__(self, run: RunDir) -> None:
        self._folder = run.payloads
        self._files: Session | None = None
        if (copy := run.copy()) is not None:
            self._files = Head(copy["head"], run.token(), timeout_s=_PATIENCE_S).session()

    def read(self, group: BatchGroup, sequences: Sequence[int], controller: ControllerClient) -> GroupPayload:
        """Read the given sequences of a group, in that order. Raises ProcessError if they are not available."""
        try:
            if (files := self._files) is None:
                return read_group_file(self._folder, group, sequences)
            return read_group(lambda spans: _fetched(files, group, spans), group, sequences)
        except (OSError, StorageError) as error:
            logger.warning("group %d: can't read it, requesting it from the controller: %s", group.group_id, error)
            return read_group(lambda spans: controller.group(group.group_id, spans), group, sequences)


def _fetched(files: Session, group: BatchGroup, spans: Sequence[Span]) -> list[bytes]:
    """Fetch spans of a group's payload from the head node.

    Raises StorageError if the head node lacks them, ProcessError if it is away too long.
    """
    path = f"/payloads/{group.segment}?spans={spans_text(in_segment(group, spans))}"
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            status, content = files.request("GET", path)
            break
        except HeadNodeError as error:
            if time.monotonic() > deadline:
                raise ProcessError(f"no trajectories within {_PATIENCE_S:.0f} s: {error}") from None
            time.sleep(_RETRY_S)
    if status != 200:
        raise StorageError(f"{status}: {content.decode(errors='replace')}")
    return cut(content, spans)
