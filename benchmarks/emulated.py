"""How much faster is asynchronous training on accelerators? Emulated clusters in both modes.

    python -m benchmarks.emulated [--models 1.5b,7b,14b,32b] [--pairs 2] [--steps 3] [--minutes 1.6] [--predict]
                                  [field=value ...]

Real controllers, ledgers, gates, hand-overs and training loops run with engines that emulate the times of an
accelerator: see docs/emulation.md. One parameter is fitted, to the synchronous step of the paper's 1.5B row; all else
is predicted. `--pairs` is the number of runs of the first model in each mode; the others run once. At the end the time
model alone shows the sensitivity of the ratios, in virtual time (`_sensitivity.py`). `--predict` shows only that.

In asynchronous runs three quarters of the devices generate, as in the paper. In synchronous runs half of them generate,
and then the other half trains, as in AReaL's published recipes for synchronous runs.

The overhead of this machine between two steps, 0.3 to 0.5 s, counts `emulation.speed`-fold, in asynchronous mode too if
the trainer always has a batch. So the speed of each model makes a synchronous step take twenty real seconds.
Synchronous runs end after `--steps` steps and a first one, which is not counted. Asynchronous runs end after
`--minutes`, so that no batch waits only for its last completions. Their first third is not counted: its completions
start together and so have the same age, which does not happen later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError
from areal_core.run.launcher import execute, run_folder
from areal_core.storage.rundir import RunDir
from areal_core.types import RunStatus
from benchmarks import _harness
from benchmarks._sensitivity import VARIATIONS, Arms, Steps, study
from flows.compose import compose

MODES = ("sync", "async")
_WARM = 1 / 3  # of an asynchronous run's time, not counted
_ENDLESS = 10_000  # steps, more than any run makes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the paper's Table 1: hours for a number of steps, and the staleness bound of its task (Table 3)."""

    steps: int
    sync_h: float
    async_h: float
    max_staleness: int
    speed: int  # emulated seconds in a real one, with which a synchronous step takes twenty real ones

    @property
    def ratio(self) -> float:
        return self.sync_h / self.async_h

    def step_s(self, mode: str) -> float:
        return 3600 * (self.sync_h if mode == "sync" else self.async_h) / self.steps


PAPER = {
    "1.5b": Row(steps=250, sync_h=41.0, async_h=14.8, max_staleness=8, speed=30),
    "7b": Row(steps=250, sync_h=57.7, async_h=25.4, max_staleness=8, speed=44),
    "14b": Row(steps=80, sync_h=48.8, async_h=21.9, max_staleness=4, speed=103),
    "32b": Row(steps=60, sync_h=51.1, async_h=31.1, max_staleness=4, speed=110),
}
_FITTED = "1.5b"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured steps of one run.
    Tokens and seconds are those of the emulated cluster, unless called real."""

    steps: int
    step_s: float
    tokens_per_s: float  # of the batches of these steps, of the slice
    trainer_wait: float  # share of the time
    generation_idle: float  # share of the time, mean of the servers
    server_cpu: float  # cores that one generation server keeps busy, mean of the servers, real
    controller_cpu: float  # the same of the controller with its reward workers


class CpuMeter:
    """CPU time of a run's processes, found by its ready files, at the last check."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: dict[str, tuple[float, float]] = {}  # process -> CPU seconds, seconds since its start

    def look(self, _: RunStatus) -> None:
        for file in self._run.ready.glob("[!.]*.json"):
            try:
                process = psutil.Process(json.loads(file.read_text())["pid"])
                family = [process, *process.children(recursive=True)]
                spent = sum(sum(each.cpu_times()[:2]) for each in family)
                self._seen[file.stem] = spent, time.time() - process.create_time()
            except (OSError, psutil.NoSuchProcess):
                continue  # it has just ended

    def cores(self, role: str) -> float:
        shares = [spent / alive for name, (spent, alive) in self._seen.items() if name.startswith(role)]
        return statistics.mean(shares) if shares else 0.0


def main() -> None:
    arguments = parse()
    _harness.report(lambda: ({} if arguments.predict else _compare(arguments)) | _predict(arguments))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `arguments` replace it."""
    parser = _harness.parser(__doc__)
    parser.add_argument("--models", type=_harness.some_of(list(PAPER)), default=list(PAPER))
    parser.add_argument("--pairs", type=_harness.positive, default=2, help="number of pairs of runs of the first model")
    parser.add_argument(
        "--steps", type=_harness.positive, default=3, help="steps of each synchronous run after its first step"
    )
    parser.add_argument("--minutes", type=float, default=1.6, help="real minutes of each asynchronous run")
    parser.add_argument("--predict", action="store_true", help="start no run; compute step times with the time model")
    return parser.parse_intermixed_args(arguments)


def _config(model: str, mode: str, seed: int, overrides: Sequence[str]) -> RunConfig:
    staleness = PAPER[model].max_staleness if mode == "async" else 0
    arm = [f"mode={mode}", f"rollout.max_staleness={staleness}", f"seed={seed}"]
    config = compose(f"emulated-{model}", [*overrides, *arm])
    if mode == "async":
        return config
    half = config.launch.devices // 2
    share = -(-config.rollout.batch_size // half)  # of a server, decoded at once unless the KV cache is full
    halves = [f"generation.servers={half}", f"generation.slots={share}", f"training.ranks={half}"]
    return compose(f"emulated-{model}", [*overrides, *arm, *halves])


def _predict(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = {
        model: Arms(
            sync=_config(model, "sync", 1, arguments.overrides),
            asynchronous=_config(model, "async", 1, arguments.overrides),
        )
        for model in dict.fromkeys([_FITTED, *arguments.models])
    }
    found = study(rows, PAPER[_FITTED].step_s("sync"))
    _harness.tell("\n".join(table(found)))
    return prediction(found)


def table(found: Mapping[str, Mapping[str, Steps]]) -> list[str]:
    """The ratios of each variation and their distance from the paper's, one line each."""
    rows = [["by the time model", "overhead, ms", *next(iter(found.values()))]]
    for name, steps in found.items():
        ratios = [f"{each.ratio:.2f} ({each.ratio / PAPER[model].ratio - 1:+.0%})" for model, each in steps.items()]
        rows.append([name, f"{1e3 * steps[_FITTED].overhead_s:.1f}", *ratios])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def prediction(found: Mapping[str, Mapping[str, Steps]]) -> dict[str, Any]:
    """Step times as configured, and the ratios of every variation in the order of the models, as JSON values."""
    configured = found[next(iter(VARIATIONS))]
    return {
        "predicted_step_s": {
            model: {"sync": round(each.sync_s), "async": round(each.async_s)} for model, each in configured.items()
        },
        "sensitivity": {name: [round(each.ratio, 2) for each in steps.values()] for name, steps in found.items()},
    }


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, list[dict[str, Measured]]] = {}
    parameters: dict[str, dict[str, Any]] = {}
    with _harness.scratch_runs() as here:
        ends = {
            "sync": [f"training.steps={1 + arguments.steps}"],
            "async": [f"training.steps={_ENDLESS}", f"stop.minutes={arguments.minutes}"],
        }
        for model in arguments.models:
            common = [*here, f"emulation.speed={PAPER[model].speed}", *arguments.overrides]
            parameters[model] = asdict(_config(model, "sync", 1, common).emulation)
            for seed in range(1, 1 + (arguments.pairs if model == arguments.models[0] else 1)):
                pair: dict[str, Measured] = {}
                for mode in _harness.in_turns(MODES, seed - 1):
                    config = _config(model, mode, seed, [*common, *ends[mode]])
                    pair[mode] = _run(config, f"{model}-{mode}-{seed}")
                measured.setdefault(model, []).append(pair)
            _harness.tell(f"{model}: {step_times(model, measured[model])}")
    return report(measured) | {"parameters": parameters}


def report(measured: Mapping[str, Sequence[Mapping[str, Measured]]]) -> dict[str, Any]:
    """The results by model beside those of the paper, as JSON values.

    They are ratios of step times, like the paper's hours, and of tokens per second. The two differ if batches
    of one mode happen to be longer."""

    def ratios(of: Callable[[Mapping[str, Measured]], float]) -> dict[str, list[float]]:
        return {model: [round(of(pair), 2) for pair in pairs] for model, pairs in measured.items()}

    by_step = ratios(lambda pair: pair["sync"].step_s / pair["async"].step_s)
    by_tokens = ratios(lambda pair: pair["async"].tokens_per_s / pair["sync"].tokens_per_s)
    return {
        "ratios": {model: round(statistics.median(each), 2) for model, each in by_step.items()},
        "paper_ratios": {model: round(PAPER[model].ratio, 2) for model in measured},
        "each_ratio": by_step,
        "token_ratios": by_tokens,
        "step_s": {model: step_times(model, pairs) for model, pairs in measured.items()},
        "runs": {
            model: [
                {
                    mode: {name: float(f"{value:.3g}") for name, value in asdict(run).items()}
                    for mode, run in pair.items()
                }
                for pair in pairs
            ]
            for model, pairs in measured.items()
        },
        "fitted_to": _FITTED,
    }


def step_times(model: str, pairs: Sequence[Mapping[str, Measured]]) -> dict[str, dict[str, Any]]:
    """Emulated seconds of a step by mode, the median of the runs, and the number of measured steps of each run."""
    return {
        mode: {
            "measured": round(statistics.median(pair[mode].step_s for pair in pairs)),
            "paper": round(PAPER[model].step_s(mode)),
            "steps": [pair[mode].steps for pair in pairs],
        }
        for mode in MODES
    }


def _run(config: RunConfig, run_id: str) -> Measured:
    run = run_folder(config, run_id)
    meter = CpuMeter(run)
    summary = execute(config, run_id=run_id, log=_harness.tell, on_status=meter.look)
    assert summary.tokens.balanced, summary.tokens
    result = measure(config, _harness.history(config, run_id), meter.cores("generation"), meter.cores("controller"))
    _harness.tell(f"{run_id}: {result}")
    return result


def measure(
    config: RunConfig, history: Mapping[str, Mapping[int, float]], server_cpu: float, controller_cpu: float
) -> Measured:
    """Metrics of a run's steps, without those before `first_end`."""
    ends = history["time/elapsed_s"]
    first, last = first_end(config.mode, ends), max(ends, default=0)
    if last <= first:
        raise ArealError(
            "--minutes: too short, as no step ended after the first third of an asynchronous run; raise it"
        )
    real_s = ends[last] - ends[first]

    def mean(key: str) -> float:
        return statistics.fmean(value for step, value in history[key].items() if first < step <= last)

    tokens = (last - first) * config.rollout.batch_size * mean("completion/tokens_mean")
    return Measured(
        steps=last - first,
        step_s=config.emulation.speed * real_s / (last - first),
        tokens_per_s=config.token_rate * tokens / real_s,
        trainer_wait=mean("bubble/trainer_wait"),
        generation_idle=mean("bubble/generation_idle"),
        server_cpu=server_cpu,
        controller_cpu=controller_cpu,
    )


def first_end(mode: str, ends: Mapping[int, float]) -> int:
    """The step whose end starts the measurement, from the end times of steps in seconds.
    It is the first step of a synchronous run, and the first that ends after a third of an asynchronous run."""
    begin_s = _WARM * max(ends.values(), default=0.0) if mode == "async" else 0.0
    return min((step for step, end_s in ends.items() if end_s >= begin_s), default=0)


if __name__ == "__main__":
    main()
