"""Named points: every place where a promise hangs on the order of two effects, and a process may die between them.

They name functions of areal_core; `inject/sitecustomize.py` wraps these in the processes of a run. A function that was
renamed is found by the test that resolves them all.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("inject")

LAUNCHER = r"-m areal_core( |$)"  # patterns in command lines
CONTROLLER = r"areal_core\.controller\.service"
TRAINER = r"areal_core\.training\.trainer"
SERVER = r"areal_core\.generation\.server\.routes.*ready/generation-"
EVALUATION = r"areal_core\.generation\.server\.routes.*ready/evaluation-"
REWARD = r"areal_core\.rewards\.worker import serve"
EVALUATOR = r"areal_core\.evaluation\.evaluator"
TRACKER = r"areal_core\.tracking( |$)"
PROCESSES = {  # the kinds that they tell
    LAUNCHER: "launcher",
    CONTROLLER: "controller",
    TRAINER: "trainer",
    SERVER: "generation",
    EVALUATION: "evaluation",
    REWARD: "reward",
    EVALUATOR: "evaluator",
    TRACKER: "tracker",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment in the life of a process: before (`enter`) or after (`exit`) the `nth` call of a function whose
    arguments match `where`."""

    name: str
    process: str
    target: str
    when: str
    nth: int = 1
    where: str = ""
    needs: str = ""  # what the run has to be: resumed, moved (to a new machine), tracked, scored, at its end

    def resolve(self) -> Any:
        """The function. Raises ImportError or AttributeError where there is none."""
        module, _, path = self.target.partition(":")
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))

    def fault(self, markers: Path) -> dict[str, Any]:
        """What `sitecustomize` reads."""
        return {**asdict(self), "action": "kill", "marker": str(markers / self.name)}


def _around(
    name: str, process: str, target: str, nth: int = 1, where: str = "", needs: str = ""
) -> tuple[Point, Point]:
    """Before and after one call."""
    about: dict[str, Any] = {"process": process, "target": target, "nth": nth, "where": where, "needs": needs}
    return Point(name=f"before-{name}", when="enter", **about), Point(name=f"after-{name}", when="exit", **about)


def _named(area: str, *points: tuple[Point, Point]) -> list[Point]:
    return [replace(point, name=f"{area}.{point.name}") for pair in points for point in pair]


_LEDGER = "areal_core.controller.core.ledger:TrajectoryLedger"
_CLIENT = "areal_core.api.controller_client:ControllerClient"
STORE = "areal_core.storage.objects:Storage"
_SERVERS = "areal_core.generation.client:GenerationClient"
_ENGINE = "areal_core.generation.server.engine_thread:EngineThread"
_SWAP = "areal_core.generation.engines.embedded:Engine.swap"

POINTS: list[Point] = [
    *_named(
        "ledger",
        _around("admission", CONTROLLER, f"{_LEDGER}.admit", 9),
        _around("ready", CONTROLLER, f"{_LEDGER}.ready", 7),
        _around("batch-fixed", CONTROLLER, f"{_LEDGER}.fix_batch", 5),
        _around("version", CONTROLLER, f"{_LEDGER}.publish", 4),
        _around("payloads-freed", CONTROLLER, f"{_LEDGER}.free"),
        _around("resumed", CONTROLLER, f"{_LEDGER}.resume", needs="resumed"),
    ),
    *_named(
        "controller",
        _around("batch-recorded", CONTROLLER, "areal_core.controller.recorder:Recorder.batch_fixed", 3),
        _around("version-recorded", CONTROLLER, "areal_core.controller.recorder:Recorder.published", 3),
        _around("join", CONTROLLER, "areal_core.controller.pool:GenerationPool.join"),
        _around("payload-stored", CONTROLLER, "areal_core.controller.payloads:PayloadStore._flush", 6),
        _around("segment-sealed", CONTROLLER, "areal_core.controller.payloads:PayloadStore._seal"),
        _around("payload-uploaded", CONTROLLER, f"{STORE}.put_file", where=r"'payloads/"),
        _around("segments-deleted", CONTROLLER, "areal_core.controller.payloads:PayloadStore._delete"),
        _around("ledger-copied", CONTROLLER, "areal_core.controller.snapshots:snapshot"),
        _around("summary", CONTROLLER, "areal_core.controller.recorder:Recorder.summary", needs="end"),
    ),
    *_named(
        "update",
        _around("staged", CONTROLLER, f"{_SERVERS}._stage", 2),
        _around("paused", CONTROLLER, f"{_SERVERS}._pause", 2),
        _around("swapped", CONTROLLER, f"{_SERVERS}._swap", 2),
        _around("resumed", CONTROLLER, f"{_SERVERS}._resume_after_update", 2),
    ),
    *_named(
        "restore",
        _around("fetched", CONTROLLER, "areal_core.storage.checkpoint:newest_of", needs="moved"),
        _around("rewound", CONTROLLER, f"{_LEDGER}.rewind", needs="moved"),
        _around("version", CONTROLLER, "areal_core.storage.weights:publish", needs="moved"),
        _around("damage-marked", CONTROLLER, "areal_core.controller.restore:forget_damaged", needs="resumed"),
    ),
    *_named(
        "server",
        _around("pause", SERVER, f"{_ENGINE}.pause", 2),
        _around("swap", SERVER, _SWAP, 2),
        _around("resume", SERVER, f"{_ENGINE}.resume", 2),
    ),
    *_named("reward", _around("result", REWARD, "areal_core.rewards.group:GroupRollout.advance", 5)),
    *_named(
        "weights",
        _around("file", TRAINER, "areal_core.storage.weights:write_tensors", 2),
        _around("manifest", TRAINER, "areal_core.storage.weights:write_json", 2),
        _around("release", TRAINER, "areal_core.storage.weights:release", 3),
    ),
    *_named(
        "publish",
        _around("announce", TRAINER, f"{_CLIENT}.announce", 3),
        _around("metrics", TRAINER, f"{_CLIENT}.metrics", 3),
        _around("version", TRAINER, "areal_core.training.publisher:Publisher.announce"),
    ),
    *_named(
        "checkpoint",
        _around("ledger", TRAINER, f"{_CLIENT}.snapshot"),
        _around("state", TRAINER, f"{STORE}.put_file", where=r"'weights\.safetensors'"),
        _around("manifest", TRAINER, f"{STORE}.put_bytes", where=r"'manifest\.json'"),
        _around("committed", TRAINER, f"{_CLIENT}.committed"),
        _around("read", TRAINER, "areal_core.storage.parts:read_tensors", needs="resumed"),
        _around("durable", TRAINER, "areal_core.storage.durable:replace", where="manifest"),
    ),
    *_named(
        "prune",
        _around("manifest-deleted", CONTROLLER, f"{STORE}.delete", where=r"'checkpoints/step-[\d.]+/manifest\.json'"),
        _around("folder-deleted", CONTROLLER, f"{STORE}.delete", where=r"'checkpoints/step-[\d.]+'"),
    ),
    *_named(
        "trainer",
        _around("batch", TRAINER, f"{_CLIENT}.batch", 3),
        _around("group", TRAINER, f"{_CLIENT}.group", 6),
        _around("model", TRAINER, "areal_core.models.folders:write_model", needs="end"),
        _around("finish", TRAINER, f"{_CLIENT}.finish", needs="end"),
    ),
    *_named(
        "launcher",
        _around("folder", LAUNCHER, "areal_core.storage.rundir:RunDir.create"),
        _around("lease", LAUNCHER, "areal_core.storage.lease:Lease.acquire"),
        _around("lease-released", LAUNCHER, "areal_core.storage.lease:Lease.release"),
        _around("numbered", LAUNCHER, "areal_core.storage.rundir:RunDir.numbered", needs="resumed"),
        _around("server-registered", LAUNCHER, "areal_core.run.registration:ServerRegistration._register"),
        _around("close", LAUNCHER, "areal_core.run.launcher:Run._close_when_over", 2, needs="end"),
    ),
    *_named(
        "evaluator",
        _around("record", EVALUATOR, "areal_core.evaluation.scores:RecordFile.add", 3, needs="scored"),
        _around("score", EVALUATOR, f"{_CLIENT}.evaluated", needs="scored"),
    ),
    *_named("evaluation", _around("swap", EVALUATION, _SWAP, needs="scored")),
    *_named(
        "outbox",
        _around("attempt", TRACKER, "areal_core.tracking.outbox:Outbox.attempt_metrics", 2, needs="tracked"),
        _around("sent", TRACKER, "areal_core.tracking.outbox:Outbox.settle_metrics", 2, needs="tracked"),
        _around("document-sent", TRACKER, "areal_core.tracking.outbox:Outbox.settle_document", needs="tracked"),
    ),
]


def environment(faults: Iterable[Mapping[str, Any]], path: str = "") -> dict[str, str]:
    """Of processes that are struck; `path` is their PYTHONPATH otherwise."""
    return {"AREAL_FAULTS": json.dumps(list(faults)), "PYTHONPATH": ":".join(filter(None, (str(_FOLDER), path)))}
