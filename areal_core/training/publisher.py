"""Publish versions to the generation servers and commit checkpoints, in the background of steps.

Rank 0 has an ordered thread for each. A step waits only for a copy of the tensors and for the previous version. A
failure stops the trainer at its next step.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from areal_core.api.controller_client import ControllerClient
from areal_core.api.head import Head, HeadNodeError, parsed
from areal_core.config.schema import RunConfig
from areal_core.errors import ProcessError, StorageError
from areal_core.models.tensorfile import write_tensors
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.tracking.outbox import points
from areal_core.tracking.timeline import TimelineWriter
from areal_core.training.background import BackgroundThread
from areal_core.training.engines.engine import EngineState
from areal_core.types import PolicyVersion

_HAND_OVER_S = 60.0  # seconds without a sign from the head node that it fetches the version
_POLL_S = 0.2  # seconds between two checks for a failed publication


class Publisher:
    """Publishes versions and commits checkpoints of one run."""

    def __init__(self, run: RunDir, config: RunConfig, storage: Storage) -> None:
        self._run = run
        self._config = config
        self._storage = storage
        self._base_digest = None  # hash of the base model, if checkpoints hold only its adapter
        if config.training.lora.rank is not None:
            self._base_digest = weights.base_version(run.info().model_path).digest
        self._timeline = TimelineWriter(run.timeline_file("publisher"))
        self._publishing = BackgroundThread("publish", waiting=2)  # a version and its step's report
        self._saving = BackgroundThread("checkpoint", waiting=1)
        self._published: dict[int, str] = {}  # version -> hash
        self._released: list[int] = []  # versions released at the last announcement
        self._reported_step, self._reported = 0, threading.Condition()  # last step whose report was sent
        self._publishing_controller, self._saving_controller = ControllerClient(run), ControllerClient(run)

    def publish(self, step: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Publish `tensors` as version `step`, after waiting for the previous version.

        The tensors must not change until the next call returns.
        """
        self._publishing.drain()
        self._publishing.submit(lambda: self._publish(step, tensors))

    def announce(self, step: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Write and announce a version at once, and delete obsolete ones.

        A resumed trainer announces its checkpoint's version again: the old files may be damaged or on another machine.
        """
        version = weights.publish(self._run.weights, step, tensors, lora=self._config.training.lora.adapter)
        self._published[step] = version.digest
        if self._run.copy() is not None:
            version = self._handed_over(version)
        self._released = self._publishing_controller.announce(version)
        weights.release(self._run.weights, self._released)

    def check(self) -> None:
        """Raise the failure of a version or a checkpoint, if there is one."""
        self._publishing.check()
        self._saving.check()

    def report(self, step: int, values: Mapping[str, float], staleness: Counter[int]) -> None:
        """Log the metrics and the staleness histogram of a step after its version is published."""
        rows = points(step, values)
        counts = {str(lag): count for lag, count in sorted(staleness.items())}

        def send() -> None:
            self._publishing_controller.metrics(rows)
            self._publishing_controller.document("staleness_histogram", step, {"counts": counts})
            with self._reported:
                self._reported_step = step
                self._reported.notify()

        self._publishing.submit(send)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written; only one copy of the state exists at a time."""
        return self._saving.busy

    def make_room(self, timeout_s: float) -> bool:
        """Wait until no checkpoint is being written, at most `timeout_s`. Returns whether none is."""
        return self._saving.drain(timeout_s)

    def checkpoint(self, step: int, state: EngineState) -> None:
        """Commit a checkpoint of `step`: this state, and a snapshot of the token ledger.

        The snapshot waits until the ledger holds that version and the step's `report`.
        """
        self._saving.submit(lambda: self._checkpoint(step, state))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is published and committed, at most `timeout_s` for either. Returns whether it is."""
        return self._publishing.drain(timeout_s) and self._saving.drain(timeout_s)

    def _handed_over(self, version: PolicyVersion) -> PolicyVersion:
        """Hand a version over to the head node, whose data server fetches it from this machine's stager.

        Returns the version with its path there. Raises ProcessError if the head node is away too long or can't fetch
        it.
        """
        deadline = time.monotonic() + _HAND_OVER_S
        while True:
            copy = self._run.copy()
            assert copy is not None
            made = {"version": version.version, "digest": version.digest, "url": copy["stager"]}
            body = json.dumps(made | {"release": self._released}).encode()
            try:
                with closing(Head(copy["head"], self._run.token()).session()) as session:
                    status, content = session.request("POST", f"/nodes/{copy['node']}/versions", body)
                    if status == 200:
                        return replace(version, path=parsed(content)["path"])
                    said = f"{status}: {content.decode(errors='replace')}"
                    if status == 202:  # the head node is fetching it
                        deadline = time.monotonic() + _HAND_OVER_S
            except HeadNodeError as error:
                said = str(error)
            if time.monotonic() > deadline:
                raise ProcessError(f"the head node did not fetch version {version.version}: {said}")
            time.sleep(_POLL_S)

    def _publish(self, step: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        start = time.monotonic()
        self.announce(step, tensors)
        end = time.monotonic()
        self._timeline.span("publish", start, end, step)
        self._publishing_controller.metrics(points(step, {"time/publish_s": end - start}))

    def _checkpoint(self, step: int, state: EngineState) -> None:
        start = time.monotonic()
        files = self._written(state)
        with self._reported:
            while self._reported_step < step:
                self._reported.wait(_POLL_S)
                self._publishing.check()
        snapshot = self._saving_controller.snapshot(step)
        uploaded, shared = (
            {name: checkpoint.FileEntry(**entry) for name, entry in snapshot[kind].items()}
            for kind in ("files", "shared")
        )
        checkpoint.save(
            self._storage,
            step,
            files,
            {
                "engine": state.scalars,
                "config": self._config.to_dict(),
                checkpoint.VERSION: self._published[step],
                checkpoint.BASE: self._base_digest,
                checkpoint.PROMPTS: self._run.info().prompts,
            },
            number=self._run.info().number,  # of this run's launcher: a later one may have taken over
            uploaded=uploaded,
            shared=shared,
        )
        self._timeline.span("checkpoint", start, time.monotonic(), step)
        self._saving_controller.report_checkpoint(step)

    def _written(self, state: EngineState) -> dict[str, Path]:
        """Write the files of a state: trained weights, which are enough for a controller, and the rest."""
        weight = {name: array for name, array in state.arrays.items() if name.startswith("weight/")}
        rest = {name: array for name, array in state.arrays.items() if name not in weight}
        files: dict[str, Path] = {}
        for name, arrays in {checkpoint.WEIGHTS: weight, checkpoint.OPTIMIZER: rest}.items():
            files[name] = self._run.root / name
            try:
                write_tensors(files[name], arrays)
            except OSError as error:
                raise StorageError(f"can't write {files[name]}: {error.strerror}") from error
        return files
