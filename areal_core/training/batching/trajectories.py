"""The trajectories that a rank trains on, read from where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_core.api.controller_client import ControllerClient
from areal_core.api.scored_groups import read_group, read_group_file
from areal_core.errors import StorageError
from areal_core.types import BatchGroup, GroupPayload


class Trajectories:
    """Payloads of groups: parts of the segments in a run's folder, or, where that is another machine's or what is read
    is damaged, of the controller, which has a damaged group made again."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the segments, if they are here."""
        self._folder = folder

    def read(self, group: BatchGroup, completions: Sequence[int], controller: ControllerClient) -> GroupPayload:
        """Some completions of a group, in the order given, and nothing of the others. Raises ProcessError where they
        can't be had."""
        try:
            return read_group_file(self._folder, group, completions)
        except (OSError, StorageError):
            return read_group(lambda spans: controller.group(group.group_id, spans), group, completions)
