"""The trajectories that a rank trains on, read from where they lie."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from areal_core.api.controller_client import ControllerClient
from areal_core.api.head import AwayError, Head, Session
from areal_core.api.scored_groups import Span, cut, in_segment, read_group, read_group_file, spans_text
from areal_core.errors import ProcessError, StorageError
from areal_core.storage.rundir import RunDir
from areal_core.types import BatchGroup, GroupPayload

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # for a data server that is away, and for it to go on with a response
_RETRY_S = 0.2  # between two tries


class Trajectories:
    """Payloads of groups: parts of segments. On the head node a rank reads them in the run's folder. Elsewhere it asks
    the data server for them. The controller is asked for what is damaged or gone, and has it made again. For one thread
    at a time."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.payloads
        self._files: Session | None = None
        if (copy := run.copy()) is not None:
            self._files = Head(copy["head"], run.token(), timeout_s=_PATIENCE_S).session()

    def read(self, group: BatchGroup, sequences: Sequence[int], controller: ControllerClient) -> GroupPayload:
        """Some sequences of a group, in the order given, and nothing of the others. Raises ProcessError where they
        can't be had."""
        try:
            if (files := self._files) is None:
                return read_group_file(self._folder, group, sequences)
            return read_group(lambda spans: _fetched(files, group, spans), group, sequences)
        except (OSError, StorageError) as error:
            logger.warning("group %d: the controller is asked for it: %s", group.group_id, error)
            return read_group(lambda spans: controller.group(group.group_id, spans), group, sequences)


def _fetched(files: Session, group: BatchGroup, spans: Sequence[Span]) -> list[bytes]:
    """Spans of a group's payload, from the head node. Raises StorageError for what it has not, ProcessError where it
    has been away for too long."""
    path = f"/payloads/{group.segment}?spans={spans_text(in_segment(group, spans))}"
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            status, content = files.ask("GET", path)
            break
        except AwayError as error:
            if time.monotonic() > deadline:
                raise ProcessError(f"no trajectories within {_PATIENCE_S:.0f} s: {error}") from None
            time.sleep(_RETRY_S)
    if status != 200:
        raise StorageError(f"{status}: {content.decode(errors='replace')}")
    return cut(content, spans)
