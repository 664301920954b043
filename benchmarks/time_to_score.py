"""How long does the main job take to learn? The default experiment for several seeds, each from the same base model.

    python -m benchmarks.time_to_score [--seeds 1,2,3] [field=value ...]

`rl_wall_s` runs from the moment the first generation server takes work until the last version is published; start-up
and the cached warm-up are outside. Both accuracies are greedy, over all held-out prompts.
"""

from __future__ import annotations

import argparse
import sys

from areal_core.__main__ import configuration
from areal_core.errors import ArealError
from areal_core.run.launcher import execute
from areal_core.types import RunSummary
from benchmarks._machine import last_line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    arguments = parser.parse_args()
    try:
        summaries = [_run(seed, arguments.overrides) for seed in arguments.seeds]
    except ArealError as error:
        raise SystemExit(f"areal: error: {error}") from None
    print(
        last_line(
            {
                "accuracy_before": [round(summary.accuracy_before, 4) for summary in summaries],
                "accuracy_after": [round(summary.accuracy_after, 4) for summary in summaries],
                "rl_wall_s": [round(summary.rl_wall_s, 2) for summary in summaries],
                "steps": [summary.steps for summary in summaries],
                "seeds": arguments.seeds,
            }
        )
    )


def _run(seed: int, overrides: list[str]) -> RunSummary:
    config = configuration(None, ["name=time-to-score", f"seed={seed}", *overrides])
    return execute(config, log=lambda line: print(f"seed {seed}: {line}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
