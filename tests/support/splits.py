"""Made-up measurements of runs whose best split of devices is known."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

from areal_core.config.schema import RunConfig, load
from areal_core.planning.split import DecodePace, Rates
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow

FIXED_S, COMPLETION_S = 0.01, 0.0001  # of a decode step
PACE = DecodePace(fixed_s=FIXED_S, completion_s=COMPLETION_S)
SLOTS = 100
RUNNING = 0.8  # of a group's completions, over its time
TRAINED = 4000.0  # tokens a second of one rank
GENERATED = SLOTS / (FIXED_S + SLOTS * COMPLETION_S)  # of one server with all its slots in use: 5000


def config(servers: int, ranks: int, devices: int = 8, **rollout: Any) -> RunConfig:
    return load(
        {
            "launch": {"accelerator": "cuda", "devices": devices},
            "generation": {"servers": servers, "slots": SLOTS},
            "training": {"ranks": ranks, "minibatches": 1},
            "algorithm": {"group_size": 16},
            "rollout": {"batch_size": 1024, "max_staleness": 4, **rollout},
        }
    )


def measured(servers: int, ranks: int) -> Rates:
    """A pipeline without loss: the slower stage works all the time, the other one as much as it has to."""
    throughput = min(servers * GENERATED, ranks * TRAINED)
    return Rates(
        effective_tokens_per_s=throughput,
        generated_tokens_per_s=throughput,
        trained_share=throughput / (ranks * TRAINED),
        running_share=RUNNING,
        pace=PACE,
    )


def curves(servers: int, ranks: int, steps: int) -> dict[str, list[tuple[int, float]]]:
    """What a run without loss would log: with more servers than training needs, these run fewer completions at once."""
    throughput = min(servers * GENERATED, ranks * TRAINED)
    per_server = throughput / servers  # = n / (a + b n)
    n = FIXED_S * per_server / (1 - COMPLETION_S * per_server)

    def constant(value: float) -> list[tuple[int, float]]:
        return [(step, value) for step in range(2, steps + 1)]

    return {
        "time/step_s": constant(2.0),
        "throughput/generated_tokens_per_s": constant(throughput),
        "throughput/effective_tokens_per_s": [(1, 99.0), *constant(throughput)],
        "rollout/running_completions": constant(n),
        "bubble/generation_idle": constant(0.0),
        "bubble/generation_paused": constant(0.0),
        "bubble/trainer_wait": constant(1 - throughput / (ranks * TRAINED)),
        "completion/tokens_mean": constant(40.0),
        "completion/tokens_longest": constant(40.0 / RUNNING),
    }


def recorded_run(state: Path, servers: int, ranks: int) -> RunDir:
    """The folder of a run that logged these."""
    chosen = dataclasses.replace(config(servers, ranks), state_dir=str(state))
    run = RunDir.create(chosen, RunInfo(run_id="first", model_path="/models/base", checkpoint_url="/store/first"))
    with closing(Outbox(run.outbox, "first")) as outbox:
        for key, points in curves(servers, ranks, chosen.training.steps).items():
            outbox.log([MetricRow(key=key, step=step, value=value, time_s=0.0) for step, value in points])
    return run
