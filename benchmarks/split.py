"""Is the advised split of devices the best one? An emulated cluster runs with every split.

    python -m benchmarks.split [--devices 8] [--minutes 0.6] [--speed 100] [field=value ...]

It runs the 1.5B model of `benchmarks.emulated` on so many replicas, with their share of the paper's batch and eta 8,
once for each number of training devices. Two of these runs give advice (areal_core.planning.split): the run with the
fewest generation servers, whose bottleneck is generation, and the run with one rank, whose bottleneck is training.
The benchmark compares the advice with the measurements. The first third of each run is left out, as in
`benchmarks.emulated`:

- `advised_over_best`: throughput of the advised split over that of the best measured one;
- `promised_over_measured`: throughput that the advice predicts for its split, over the measured one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.planning.split import Split, splits_of_run
from areal_core.run.launcher import execute, run_folder
from benchmarks import _harness
from benchmarks.emulated import measure
from flows.compose import compose

_COMPLETIONS = 64  # of a batch, for each replica: 8192 of the paper's 128
_ENDLESS = 10_000  # steps, more than any run makes

Speeds = Mapping[int, float]  # ranks -> tokens/s of the emulated cluster


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.6, help="real minutes of each run")
    parser.add_argument("--speed", type=float, default=100.0, help="emulated seconds per real second")
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: _measure(arguments))


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    devices, speeds, advised = arguments.devices, {}, {}
    with _harness.scratch_runs() as here:
        for ranks in range(1, devices):
            config = _config(arguments, ranks, here)
            speeds[ranks] = _run(config, f"ranks-{ranks}")
            _harness.tell(f"{devices - ranks} servers, {ranks} ranks: {speeds[ranks]:.0f} tokens/s")
            if ranks in (1, devices - 1):
                advised[ranks] = splits_of_run(run_folder(config, f"ranks-{ranks}"))[0]
                _harness.tell(f"advice of this run: {advised[ranks]}")
    return report(speeds, advised)


def _config(arguments: argparse.Namespace, ranks: int, here: list[str]) -> RunConfig:
    return compose(
        "emulated-1.5b",
        [
            *here,
            *("rollout.max_staleness=8", f"rollout.batch_size={_COMPLETIONS * arguments.devices}"),
            *(f"training.steps={_ENDLESS}", f"stop.minutes={arguments.minutes}"),
            *(f"launch.devices={arguments.devices}", f"emulation.speed={arguments.speed}", *arguments.overrides),
            *(f"generation.servers={arguments.devices - ranks}", f"training.ranks={ranks}"),
        ],
    )


def _run(config: RunConfig, run_id: str) -> float:
    execute(config, run_id=run_id, log=_harness.tell)
    return measure(config, _harness.history(config, run_id), 0.0, 0.0).tokens_per_s


def report(speeds: Speeds, advised: Mapping[int, Split]) -> dict[str, Any]:
    """Advice of the run with this many ranks beside the measurements, as JSON values."""
    best = max(speeds, key=speeds.__getitem__)
    devices = max(speeds) + 1
    found = {
        "generation" if ranks > 1 else "training": {
            "split": f"{devices - ranks}+{ranks}",
            "advised": f"{split.servers}+{split.ranks}",
            "advised_over_best": round(speeds[split.ranks] / speeds[best], 3),
            "promised_over_measured": round(split.ratio * speeds[ranks] / speeds[split.ranks], 3),
        }
        for ranks, split in advised.items()
    }
    return {
        "advised_over_best": min(each["advised_over_best"] for each in found.values()),
        "best": f"{devices - best}+{best}",
        "where_this_was_short": found,
        "tokens_per_s": {f"{devices - ranks}+{ranks}": round(speed) for ranks, speed in speeds.items()},
    }


if __name__ == "__main__":
    main()
