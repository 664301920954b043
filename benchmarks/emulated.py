"""What is asynchrony worth on memory-bound accelerators? Emulated clusters, synchronous against asynchronous.

    python -m benchmarks.emulated [--models 1.5b,7b,14b,32b] [--pairs 2] [--minutes 0.7] [field=value ...]

Real controllers, ledgers, gates, hand-overs and trainers' loops against engines that take an accelerator's time: see
docs/emulation.md. One set of parameters, fitted to both step times of the paper's 1.5B row; the other rows are
predictions. `--pairs` is how often the first model is run in both modes; the others are run once.

Throughput is that of the steps after the first third of a run: until then answers are of an age, as they never are
again in asynchronous runs. Runs end by `stop.minutes`, so that no batch waits for its last answers alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import psutil

from areal_core.config import RunConfig
from areal_core.errors import ArealError
from areal_core.run import execute, run_folder
from areal_core.rundir import RunDir
from areal_core.tracking.outbox import Outbox
from areal_core.types import RunStatus
from flows.compose import compose

_WARM = 1 / 3  # of a run's time, not counted
_STEPS = 10_000  # more than any run makes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the paper's Table 1: hours of so many steps, and the staleness bound of its task (Table 3)."""

    steps: int
    sync_h: float
    async_h: float
    max_staleness: int

    def step_s(self, mode: str) -> float:
        return 3600 * (self.sync_h if mode == "sync" else self.async_h) / self.steps


PAPER = {
    "1.5b": Row(steps=250, sync_h=41.0, async_h=14.8, max_staleness=8),
    "7b": Row(steps=250, sync_h=57.7, async_h=25.4, max_staleness=8),
    "14b": Row(steps=80, sync_h=48.8, async_h=21.9, max_staleness=4),
    "32b": Row(steps=60, sync_h=51.1, async_h=31.1, max_staleness=4),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run, after its first third. Tokens and seconds are the emulated cluster's unless they are called real."""

    tokens_per_s: float  # consumed, of the slice
    step_s: float
    steps: int
    trainer_wait: float  # share of the time
    generation_idle: float  # share of the time, mean of the servers
    server_cpu: float  # cores that one generation server keeps busy, mean of the servers, real
    controller_cpu: float  # the same of the controller with its reward workers


class CpuMeter:
    """CPU time of a run's processes, from its ready files, as of the last look."""

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(PAPER))
    parser.add_argument("--pairs", type=int, default=2, help="of runs of the first model")
    parser.add_argument("--minutes", type=float, default=0.7, help="of each run, real")
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="areal-emulated-") as state:
            common = [f"state_dir={state}", f"storage.url={state}/storage", "tracking=off", *arguments.overrides]
            common += [f"training.steps={_STEPS}", f"stop.minutes={arguments.minutes}"]
            print(json.dumps(_compare(arguments.models, arguments.pairs, common)))
    except ArealError as error:
        raise SystemExit(f"areal: error: {error}") from None


def _compare(models: Sequence[str], pairs: int, overrides: Sequence[str]) -> dict[str, object]:
    measured: dict[str, list[dict[str, Measured]]] = {}
    for model in models:
        for seed in range(1, 1 + (pairs if model == models[0] else 1)):
            modes = ("sync", "async") if seed % 2 else ("async", "sync")
            measured.setdefault(model, []).append({mode: _run(model, mode, seed, overrides) for mode in modes})
    ratios = {
        model: [pair["async"].tokens_per_s / pair["sync"].tokens_per_s for pair in measured[model]] for model in models
    }
    config = _config(models[0], "async", 1, overrides)
    return {
        "ratios": {model: round(statistics.median(ratios[model]), 3) for model in models},
        "paper_ratios": {model: round(PAPER[model].sync_h / PAPER[model].async_h, 2) for model in models},
        "each_ratio": {model: [round(ratio, 3) for ratio in ratios[model]] for model in models},
        "step_s": {
            model: {mode: round(statistics.median(pair[mode].step_s for pair in measured[model])) for mode in modes}
            for model in models
            for modes in [("sync", "async")]
        },
        "paper_step_s": {
            model: {mode: round(PAPER[model].step_s(mode)) for mode in ("sync", "async")} for model in models
        },
        "runs": {
            model: [
                {
                    mode: {name: float(f"{value:.4g}") for name, value in asdict(run).items()}
                    for mode, run in pair.items()
                }
                for pair in measured[model]
            ]
            for model in models
        },
        "fitted_to": "1.5b",
        "parameters": asdict(config.emulation),
    }


def _config(model: str, mode: str, seed: int, overrides: Sequence[str]) -> RunConfig:
    staleness = PAPER[model].max_staleness if mode == "async" else 0
    arm = [f"mode={mode}", f"rollout.max_staleness={staleness}", f"seed={seed}"]
    return compose(f"emulated-{model}", [*overrides, *arm])


def _run(model: str, mode: str, seed: int, overrides: Sequence[str]) -> Measured:
    config, run_id = _config(model, mode, seed, overrides), f"{model}-{mode}-{seed}"
    run = run_folder(config, run_id)
    meter = CpuMeter(run)
    summary = execute(config, run_id=run_id, log=_tell, on_status=meter.look)
    assert summary.tokens.balanced, summary.tokens
    result = _measured(config, run, meter)
    _tell(f"{run_id}: {result}")
    return result


def _measured(config: RunConfig, run: RunDir, meter: CpuMeter) -> Measured:
    with closing(Outbox(run.outbox, run.root.name)) as outbox:
        history = {key: dict(points) for key, points in outbox.history().items()}
    ends, consumed = history["time/elapsed_s"], history["ledger/consumed_tokens"]
    last = max(ends)
    first = min(step for step in ends if ends[step] >= _WARM * ends[last])
    steps, real_s = last - first, ends[last] - ends[first]
    if steps < 1:
        raise ArealError(f"--minutes: too short for two steps of {run.root.name} after a third of it")

    def mean(key: str) -> float:
        return statistics.fmean(value for step, value in history[key].items() if step > first)

    return Measured(
        tokens_per_s=config.token_rate * (consumed[last] - consumed[first]) / real_s,
        step_s=config.emulation.speed * real_s / steps,
        steps=steps,
        trainer_wait=mean("bubble/trainer_wait"),
        generation_idle=mean("bubble/generation_idle"),
        server_cpu=meter.cores("generation"),
        controller_cpu=meter.cores("controller"),
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
