"""Named points: every place where a promise hangs on the order of two effects, and a process may die between them.

They name functions of areal_core; `inject/sitecustomize.py` wraps these in the processes of a run. A function that was
renamed is found by the test that resolves them all.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
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
    area, _, name = name.partition(".")
    about: dict[str, Any] = {"process": process, "target": target, "nth": nth, "where": where, "needs": needs}
    before, after = f"{area}.before-{name}", f"{area}.after-{name}"
    return Point(name=before, when="enter", **about), Point(name=after, when="exit", **about)


_LEDGER = "areal_core.controller.core.ledger:TrajectoryLedger"
_CLIENT = "areal_core.api.controller_client:ControllerClient"
STORE = "areal_core.storage.objects:Storage"
_SERVERS = "areal_core.generation.client:GenerationClient"
_ENGINE = "areal_core.generation.server.engine_thread:EngineThread"
_SWAP = "areal_core.generation.engines.embedded:Engine.swap"

POINTS = [
    *_around("ledger.admission", CONTROLLER, f"{_LEDGER}.admit", 9),
    *_around("ledger.ready", CONTROLLER, f"{_LEDGER}.ready", 7),
    *_around("ledger.batch-fixed", CONTROLLER, f"{_LEDGER}.fix_batch", 5),
    *_around("ledger.version", CONTROLLER, f"{_LEDGER}.publish", 4),
    *_around("ledger.payloads-freed", CONTROLLER, f"{_LEDGER}.free"),
    *_around("ledger.resumed", CONTROLLER, f"{_LEDGER}.resume", needs="resumed"),
    *_around("controller.batch-recorded", CONTROLLER, "areal_core.controller.recorder:Recorder.record_batch", 3),
    *_around("controller.version-recorded", CONTROLLER, "areal_core.controller.recorder:Recorder.record_step", 3),
    *_around("controller.join", CONTROLLER, "areal_core.controller.pool:GenerationPool.join"),
    *_around("controller.payload-stored", CONTROLLER, "areal_core.controller.payloads:PayloadStore._flush", 6),
    *_around("controller.segment-sealed", CONTROLLER, "areal_core.controller.payloads:PayloadStore._seal"),
    *_around("controller.payload-uploaded", CONTROLLER, f"{STORE}.put_file", where=r"'payloads/"),
    *_around("controller.segments-deleted", CONTROLLER, "areal_core.controller.payloads:PayloadStore._delete"),
    *_around("controller.ledger-copied", CONTROLLER, "areal_core.controller.snapshots:snapshot"),
    *_around("controller.summary", CONTROLLER, "areal_core.controller.recorder:Recorder.summary", needs="end"),
    *_around("update.staged", CONTROLLER, f"{_SERVERS}._stage", 2),
    *_around("update.paused", CONTROLLER, f"{_SERVERS}._pause", 2),
    *_around("update.swapped", CONTROLLER, f"{_SERVERS}._swap", 2),
    *_around("update.resumed", CONTROLLER, f"{_SERVERS}._resume_after_update", 2),
    *_around("restore.fetched", CONTROLLER, "areal_core.storage.checkpoint:newest_of", needs="moved"),
    *_around("restore.rewound", CONTROLLER, f"{_LEDGER}.rewind", needs="moved"),
    *_around("restore.version", CONTROLLER, "areal_core.storage.weights:publish", needs="moved"),
    *_around("restore.damage-marked", CONTROLLER, "areal_core.controller.restore:forget_damaged", needs="resumed"),
    *_around("server.pause", SERVER, f"{_ENGINE}.pause", 2),
    *_around("server.swap", SERVER, _SWAP, 2),
    *_around("server.resume", SERVER, f"{_ENGINE}.resume", 2),
    *_around("reward.result", REWARD, "areal_core.rewards.group:GroupRollout.deliver", 5),
    *_around("weights.file", TRAINER, "areal_core.storage.weights:write_tensors", 2),
    *_around("weights.manifest", TRAINER, "areal_core.storage.weights:write_json", 2),
    *_around("weights.release", TRAINER, "areal_core.storage.weights:release", 3),
    *_around("publish.announce", TRAINER, f"{_CLIENT}.announce", 3),
    *_around("publish.metrics", TRAINER, f"{_CLIENT}.metrics", 3),
    *_around("publish.version", TRAINER, "areal_core.training.publisher:Publisher.announce"),
    *_around("checkpoint.ledger", TRAINER, f"{_CLIENT}.snapshot"),
    *_around("checkpoint.state", TRAINER, f"{STORE}.put_file", where=r"'weights\.safetensors'"),
    *_around("checkpoint.manifest", TRAINER, f"{STORE}.put_bytes", where=r"'manifest\.json'"),
    *_around("checkpoint.committed", TRAINER, f"{_CLIENT}.report_checkpoint"),
    *_around("checkpoint.read", TRAINER, "areal_core.storage.parts:read_tensors", needs="resumed"),
    *_around("checkpoint.durable", TRAINER, "areal_core.storage.durable:replace", where="manifest"),
    *_around(
        "prune.manifest-deleted", CONTROLLER, f"{STORE}.delete", where=r"'checkpoints/step-[\d.]+/manifest\.json'"
    ),
    *_around("prune.folder-deleted", CONTROLLER, f"{STORE}.delete", where=r"'checkpoints/step-[\d.]+'"),
    *_around("trainer.batch", TRAINER, f"{_CLIENT}.batch", 3),
    *_around("trainer.group", TRAINER, f"{_CLIENT}.group", 6),
    *_around("trainer.model", TRAINER, "areal_core.models.folders:write_model", needs="end"),
    *_around("trainer.finish", TRAINER, f"{_CLIENT}.finish", needs="end"),
    *_around("launcher.folder", LAUNCHER, "areal_core.storage.rundir:RunDir.create"),
    *_around("launcher.lease", LAUNCHER, "areal_core.storage.lease:Lease.acquire"),
    *_around("launcher.lease-released", LAUNCHER, "areal_core.storage.lease:Lease.release"),
    *_around("launcher.numbered", LAUNCHER, "areal_core.storage.rundir:RunDir.numbered", needs="resumed"),
    *_around("launcher.server-registered", LAUNCHER, "areal_core.run.registration:ServerRegistration._register"),
    *_around("launcher.close", LAUNCHER, "areal_core.run.launcher:Run._close_when_over", 2, needs="end"),
    *_around("evaluator.record", EVALUATOR, "areal_core.evaluation.scores:RecordFile.add", 3, needs="scored"),
    *_around("evaluator.score", EVALUATOR, f"{_CLIENT}.report_evaluation", needs="scored"),
    *_around("evaluation.swap", EVALUATION, _SWAP, needs="scored"),
    *_around("outbox.attempt", TRACKER, "areal_core.tracking.outbox:Outbox.attempt_metrics", 2, needs="tracked"),
    *_around("outbox.sent", TRACKER, "areal_core.tracking.outbox:Outbox.settle_metrics", 2, needs="tracked"),
    *_around("outbox.document-sent", TRACKER, "areal_core.tracking.outbox:Outbox.settle_document", needs="tracked"),
]


def environment(faults: Iterable[Mapping[str, Any]], path: str = "") -> dict[str, str]:
    """Of processes that are struck; `path` is their PYTHONPATH otherwise."""
    return {"AREAL_FAULTS": json.dumps(list(faults)), "PYTHONPATH": ":".join(filter(None, (str(_FOLDER), path)))}
