"""How much faster is interruptible generation than updates that wait for running completions? The paper's Fig. 6a.

    python -m benchmarks.interruption [--settings long-tail,emulated-1.5b,...] [--seeds 1,2,3] [--pairs 2]
                                      [--minutes 0.5] [--period 0.1] [field=value ...]

Asynchronous runs differ only in `generation.interruption`. In the reference an update waits: a server finishes its
running completions, starts no others meanwhile, swaps the model weights and continues, each server by itself. The
figure is generated tokens per second, recomputation included, of an arm over the reference, paired by seed.

- `server`: one embedded server on one core that always has work, with another version every `--period` seconds, about
  as often as in the run below (`_interrupted_server.py`). Generation is the bottleneck, as on the paper's cluster.
- `long-tail`: a complete run on the cores of this machine, whose bottleneck is the trainer. `recompute`, `resubmit` and
  `keep` run one after the other; the first one changes from seed to seed. `keep` continues to decode with the KV cache
  of old model weights: its train/inference KL (k3) is printed beside its speed.
- `emulated-1.5b`, `emulated-7b`: the clusters of the paper's Table 1. `-4-nodes` has the 32 accelerators of its Fig. 6a
  and the same batch of 8192 completions, and hence a longer step. Both arms of a pair run at the same time, because
  they only sleep.

The first third of a run is not counted: its completions start together and so have the same age, which does not happen
later. The last steps, for which nothing is admitted, are not counted either. Emulated runs have no last step: they end
after `--minutes`.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, ConfigError, ProcessError
from benchmarks import _harness
from benchmarks._interrupted_server import measure as measure_server
from benchmarks.emulated import PAPER as TABLE_1
from benchmarks.emulated import first_end
from flows.comparison.design import Comparison, Trial
from flows.comparison.measures import time_scale, weighted_by_time
from flows.comparison.trials import TrialResult, run_trial

SERVER = "server"
REFERENCE = "wait"
INTERRUPTED = "recompute"
PAPER = {"1.5b": 1.12, "7b": 1.17}  # Fig. 6a: 231k against 207k and 130k against 111k tokens/s
_COMPLETIONS = 8192  # of a step of the paper
_ACCELERATORS = 32  # of Fig. 6a: 4 nodes of 8
_SLOTS = 1 / 3  # of a slice's batch: three servers have one in flight, as conf/emulation/paper.yaml says
_ENDLESS = 10_000  # steps, more than any emulated run makes
_ROUNDS, _WINDOW_S = 5, 4.0  # of the lone server
_OURS = ("mode", "seed", "generation.interruption", "generation.engine")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An experiment, its arms, and the common overrides of all arms."""

    experiment: str
    arms: tuple[str, ...]  # values of generation.interruption, the reference first
    overrides: tuple[str, ...]

    @property
    def emulated(self) -> bool:
        return self.experiment.startswith("emulated")


def _emulated(model: str, speed: int, *overrides: str) -> Setting:
    return Setting(
        experiment=f"emulated-{model}",
        arms=(REFERENCE, INTERRUPTED),
        overrides=(
            f"emulation.speed={speed}",
            f"rollout.max_staleness={TABLE_1[model].max_staleness}",
            f"training.steps={_ENDLESS}",
            *overrides,
        ),
    )


def _four_nodes(model: str, speed: int) -> Setting:
    batch = _COMPLETIONS * 4 // _ACCELERATORS  # of a slice of four replicas of an accelerator each
    return _emulated(model, speed, f"rollout.batch_size={batch}", f"generation.slots={round(_SLOTS * batch)}")


# Speeds at which an update comes every two to four seconds of this machine.
SETTINGS = {
    "long-tail": Setting(
        experiment="long-tail",
        arms=(REFERENCE, INTERRUPTED, "resubmit", "keep"),
        overrides=("training.steps=60", f"evaluation.every={_harness.NEVER}"),
    ),
    "emulated-1.5b": _emulated("1.5b", 100),
    "emulated-7b": _emulated("7b", 100),
    "emulated-1.5b-4-nodes": _four_nodes("1.5b", 200),
    "emulated-7b-4-nodes": _four_nodes("7b", 400),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured steps of one run. Tokens and times are those of the emulated cluster, if there is one."""

    steps: int
    generated_tokens_per_s: float
    effective_tokens_per_s: float
    generation_idle: float  # share of the time without a running completion, mean of the servers
    generation_paused: float  # share of the time that a server is paused, mean of the servers; not while it waits
    trainer_wait: float  # share of the time
    staleness: float  # versions, mean of the tokens
    swap_ms: float  # of an update, the slowest server
    recompute_ms: float  # the same
    recomputed_tokens: float  # of an update, all servers; with resubmit those that were sent again
    k3: float | None  # nats; None: nothing was computed
    accuracy: float | None  # held-out, of the last version; the same


# Of the table: fields of Measured, and how their medians are written.
_COLUMNS = {
    "generated_tokens_per_s": ".0f",
    "effective_tokens_per_s": ".0f",
    "generation_idle": ".3f",
    "generation_paused": ".3f",
    "trainer_wait": ".3f",
    "staleness": ".2f",
    "swap_ms": ".3g",
    "recompute_ms": ".3g",
    "recomputed_tokens": ".0f",
    "k3": ".1e",
    "accuracy": ".4f",
    "steps": ".0f",
}

Runs = dict[str, dict[int, Measured]]  # arm -> seed -> run


def main() -> None:
    arguments = parse()
    _harness.report(lambda: _measure_all(arguments))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `arguments` replace it."""
    parser, known = _harness.parser(__doc__), [SERVER, *SETTINGS]
    parser.add_argument(
        "--settings", type=_harness.some_of(known), default=known, help=f"comma-separated list of {', '.join(known)}"
    )
    parser.add_argument(
        "--seeds", type=_harness.numbers, default=[1, 2, 3], help="seeds of the runs on the cores of this machine"
    )
    parser.add_argument(
        "--pairs", type=_harness.positive, default=2, help="number of pairs of emulated runs per setting"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="real minutes of each emulated run")
    parser.add_argument("--period", type=float, default=0.1, help="seconds between two updates in the setting server")
    return parser.parse_intermixed_args(arguments)


def _measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    for override in arguments.overrides:
        if (name := override.partition("=")[0]) in _OURS:
            raise ConfigError(f"{name}: must not be given, as the benchmark sets it for each arm")
    alone = _server(arguments) if SERVER in arguments.settings else {}
    runs = {name: _measure(name, arguments) for name in arguments.settings if name != SERVER}
    if runs:
        print("\n".join(table(runs)))
    return server_report(alone) | report(runs)


def trials(name: str, seeds: Sequence[int], overrides: Sequence[str]) -> list[Trial]:
    """The runs of a setting; all arms of a seed follow each other."""
    setting = SETTINGS[name]
    arms = {arm: ["mode=async", f"generation.interruption={arm}"] for arm in setting.arms}
    comparison = f"interruption-{name.replace('.', '-')}-{secrets.token_hex(3)}"
    overrides = ["tracking=off", *setting.overrides, *overrides]
    return Comparison(comparison, setting.experiment, arms, seeds, overrides).trials()


def _server(arguments: argparse.Namespace) -> dict[str, list[float]]:
    [trial, *_] = trials("long-tail", [1], arguments.overrides)
    arms = SETTINGS["long-tail"].arms
    return measure_server(
        trial.config, arms, rounds=_ROUNDS, seconds=_WINDOW_S, period_s=arguments.period, log=_harness.tell
    )


# -- runs -----------------------------------------------------------------------------------------------------------


def _measure(name: str, arguments: argparse.Namespace) -> Runs:
    """Measure a setting. Raises ProcessError if a run fails: a ratio without it would mislead."""
    found: Runs = {arm: {} for arm in SETTINGS[name].arms}
    if not SETTINGS[name].emulated:
        for trial in trials(name, arguments.seeds, arguments.overrides):
            found[trial.arm][trial.seed] = _run(trial)
        return found
    with _harness.scratch_runs() as here:
        ends = f"stop.minutes={arguments.minutes}"
        planned = trials(name, range(1, 1 + arguments.pairs), [*here, ends, *arguments.overrides])
        with _harness.processes(len(SETTINGS[name].arms)) as pool:
            for _, neighbours in groupby(planned, key=lambda trial: trial.seed):
                pair = list(neighbours)
                for trial, measured in zip(pair, pool.map(_run, pair), strict=True):
                    found[trial.arm][trial.seed] = measured
    return found


def _run(trial: Trial) -> Measured:
    result = run_trial(trial, log=lambda line: _harness.tell(f"{trial.run_id}: {line}"))
    if result.summary is None:
        raise ProcessError(f"{trial.run_id} failed: {result.failure}")
    measured = measure(result)
    _harness.tell(f"{trial.run_id}: {measured}")
    return measured


def measure(result: TrialResult) -> Measured:
    """Metrics of the measured steps of a run. Raises ArealError if there is none."""
    config, curves = result.trial.config, {key: dict(points) for key, points in result.curves.items()}
    ends = curves.get("time/elapsed_s", {})
    first, last = window(config, ends)
    if last <= first:
        raise ArealError(
            f"{result.trial.run_id}: too short, as no measured step ended; raise --minutes or training.steps"
        )
    counted = replace(
        result,
        curves={
            key: [(step, value) for step, value in points if first < step <= last]
            for key, points in result.curves.items()
        },
    )

    def rate(key: str) -> float:
        return config.token_rate * (curves[key][last] - curves[key][first]) / (ends[last] - ends[first])

    def mean(key: str) -> float | None:
        values = [value for _, value in counted.curves.get(key, [])]
        return statistics.fmean(values) if values else None

    def needed(key: str, value: Callable[[str], float | None]) -> float:
        if (found := value(key)) is None:
            raise ArealError(f"{result.trial.run_id}: the measured steps have no point of {key}")
        return found

    def share(key: str) -> float | None:
        return weighted_by_time(counted, key)

    real_tokens = config.emulation.tokens_per_token if config.emulated else 1
    return Measured(
        steps=last - first,
        generated_tokens_per_s=rate("ledger/generated_tokens"),
        effective_tokens_per_s=rate("ledger/consumed_tokens"),
        generation_idle=needed("bubble/generation_idle", share),
        generation_paused=needed("bubble/generation_paused", share),
        trainer_wait=needed("bubble/trainer_wait", share),
        staleness=needed("staleness/token_mean", mean),
        swap_ms=time_scale(config) * needed("weights/swap_ms", mean),
        recompute_ms=time_scale(config) * needed("weights/recompute_ms", mean),
        recomputed_tokens=real_tokens * needed("weights/recomputed_tokens", mean),
        k3=mean("policy/train_inference_kl"),
        accuracy=None if result.summary is None else result.summary.accuracy_after,
    )


def window(config: RunConfig, ends: Mapping[int, float]) -> tuple[int, int]:
    """First and last measured step, from the end times of steps in seconds.
    The window is from the first third of the run until the version after which nothing is admitted."""
    return first_end("async", ends), min(max(ends, default=0), config.training.steps - config.max_staleness - 1)


# -- results --------------------------------------------------------------------------------------------------------


def report(runs: Mapping[str, Runs]) -> dict[str, Any]:
    """The results by setting beside those of the paper, as JSON values."""
    found: dict[str, Any] = {}
    for name, arms in runs.items():
        key = name.replace("-", "_")
        each = ratios(arms, INTERRUPTED, "generated_tokens_per_s")
        found[f"{key}_over_waiting"] = round(statistics.median(each), 3)
        found[f"{key}_range"] = [round(min(each), 3), round(max(each), 3)]
        effective = ratios(arms, INTERRUPTED, "effective_tokens_per_s")
        found[f"{key}_effective_over_waiting"] = round(statistics.median(effective), 3)
    if long_tail := runs.get("long-tail"):
        for arm in ("resubmit", "keep"):
            each = ratios(long_tail, arm, "generated_tokens_per_s")
            found[f"{arm}_over_waiting"] = round(statistics.median(each), 3)
            found[f"{arm}_range"] = [round(min(each), 3), round(max(each), 3)]
        found |= {f"k3_{arm}": _short(_median(run.k3 for run in each.values())) for arm, each in long_tail.items()}
        found["accuracy"] = {
            arm: _short(_median(run.accuracy for run in each.values())) for arm, each in long_tail.items()
        }
    return found | {
        "paper": PAPER,
        "runs": {
            name: {
                arm: {
                    seed: {field: _short(value) for field, value in asdict(run).items()} for seed, run in each.items()
                }
                for arm, each in arms.items()
            }
            for name, arms in runs.items()
        },
    }


def server_report(speeds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Results of the setting `server` as JSON values: ratios to the reference by round, and tokens per second."""
    found: dict[str, Any] = {}
    for arm, each in speeds.items():
        over = [speed / waiting for speed, waiting in zip(each, speeds[REFERENCE], strict=True)]
        found[f"server_{arm}"] = {
            "over_waiting": round(statistics.median(over), 3),
            "range": [round(min(over), 3), round(max(over), 3)],
            "tokens_per_s": round(statistics.median(each)),
        }
    return found


def ratios(arms: Runs, arm: str, field: str) -> list[float]:
    """Ratios of an arm to the reference, paired by seed."""
    return [getattr(run, field) / getattr(arms[REFERENCE][seed], field) for seed, run in arms[arm].items()]


def table(runs: Mapping[str, Runs]) -> list[str]:
    """Medians over seeds, a line for each arm."""
    lines = [["setting", "arm", "over waiting", "range", *_COLUMNS]]
    for name, arms in runs.items():
        for arm, each in arms.items():
            over = ratios(arms, arm, "generated_tokens_per_s")
            medians = {field: _median(getattr(run, field) for run in each.values()) for field in _COLUMNS}
            shown = ["-" if value is None else format(value, _COLUMNS[field]) for field, value in medians.items()]
            lines.append([name, arm, f"{statistics.median(over):.3f}", f"{min(over):.3f}-{max(over):.3f}", *shown])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _median(values: Iterable[float | None]) -> float | None:
    """Median of the values that are not None; None without values."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
