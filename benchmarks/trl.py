"""How fast is this system beside TRL? Both train on the same task with the same cores, in turns.

    python -m benchmarks.trl [--models embedded,smollm2] [--seeds 1,2,3] [--steps 25] [--score 0.75] [field=value ...]

Two comparisons, each an experiment of this system (`CASES`): `embedded`, the default one, and `smollm2`, a pretrained
model of 135M parameters. Both systems start from the same model. They get the same prompts in the same order, the same
verifier, batch, number of optimiser updates a batch, optimiser, clipping, precision and limits (`grpo_arguments`), and
`launch.devices` cores. TRL's GRPOTrainer runs in .venv-trl (`make bench NAME=trl` creates it). The docstring of
`benchmarks.peers.trl_grpo` says how TRL was tuned.

A step generates and trains on a batch of 512 or 128 completions. The comparison is of two systems, not of two loops.
Ours generates and trains concurrently on data up to two versions old, packs, and computes a prompt once for its
completions. It does not train on completions without an advantage (for the embedded model a third to a half of the
tokens, as the policy improves). TRL alternates, pads, and computes everything.

Time runs from the first generation to the last step, the first step included. Loading, model making and evaluation are
excluded for both. If there is a score to reach, every version is kept and scored afterwards in the same way on the same
held-out prompts. Time to score is the training time of the first version that reaches the score. A speedup is TRL's
time over ours for one seed; the printed figure is the median over seeds. For each system and seed there are also: mean
reward of each batch, CPU seconds a step of the processes that generate and train, and the peak memory of all processes;
for ours the bottleneck report. Overrides apply to our experiments; TRL gets those that `grpo_arguments` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.numpy import load_file

from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError, ProcessError, StorageError
from areal_core.launch import process
from areal_core.launch.supervisor import CHILD_ENV
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.launcher import execute, prepare
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from areal_core.tracking.timeline import read_timeline
from areal_core.types import PolicyVersion
from benchmarks import _harness
from benchmarks._memory import PeakMemory
from benchmarks._scoring import Scorer
from flows.comparison.intervals import paired_ratio
from flows.compose import compose

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
SYSTEMS = ("areal", "trl")
_OWN = {"areal": "areal-flows", "torch": "torch"}  # in the JSON: distribution
TIMEOUT_S = 1800.0  # for one run of TRL
_POLL_S = 0.05  # a version stays in the store for longer than a step
_LAST_LINES = 6

Arrays = Mapping[str, Any]  # tensor name -> array


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: an experiment of this system, and the equivalent settings of TRL."""

    experiment: str
    steps: int
    score: float | None  # held-out accuracy that is to be reached; None: no version is scored
    verifier: str  # the task's, in `benchmarks.peers.verifiers`
    gold: Callable[[str], str]  # from a prompt's answer to what that verifier takes
    ranks: int | None = None  # of TRL; None: one a core
    scratch: bool = False  # whether its runs, gigabytes each, leave nothing behind


CASES = {
    "embedded": Case(experiment="cpu-async", steps=25, score=0.75, verifier="arithmetic", gold=str),
    "smollm2": Case(
        experiment="smollm2",
        steps=2,
        score=None,
        verifier="needle",
        gold=lambda told: json.loads(told)["answer"],
        scratch=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Times, costs and versions of a run of either system."""

    elapsed_s: tuple[float, ...]  # since training began, after each step
    reward: tuple[float, ...]  # mean of each batch
    cpu_s: float  # of the processes that generate and train
    peak_gib: float = 0.0
    bound: str | None = None  # what bounded it, in words
    versions: tuple[Arrays, ...] = ()  # weights after each step, if they were kept


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of one system with one seed."""

    elapsed_s: tuple[float, ...]  # since training began, after each step
    accuracy: Mapping[int, float] = field(default_factory=dict[int, float])  # step -> held-out, of those scored
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what else its figures hold

    @property
    def step_s(self) -> float:
        """Mean over all steps, the first included."""
        return self.elapsed_s[-1] / len(self.elapsed_s)

    def step_of_score(self, target: float | None) -> int | None:
        """The first scored step with at least `target`."""
        if target is None:
            return None
        return next((step for step, accuracy in sorted(self.accuracy.items()) if accuracy >= target), None)

    def time_to_score(self, target: float | None) -> float | None:
        """Seconds of training to `step_of_score`."""
        step = self.step_of_score(target)
        return None if step is None else self.elapsed_s[step - 1]


Measurements = Mapping[int, Mapping[str, Measurement]]  # seed -> system -> measurement


def speedups(measured: Measurements, target: float | None) -> dict[str, Any]:
    """TRL's time over ours: median, interval and its coverage.
    The speedup to a score is None unless a score is given and both systems reach it with every seed."""

    def ratios(seconds: Mapping[str, Mapping[int, float | None]]) -> dict[str, Any] | None:
        known = {
            system: {seed: value for seed, value in values.items() if value is not None}
            for system, values in seconds.items()
        }
        if any(len(values) < len(measured) for values in known.values()):
            return None
        return dataclasses.asdict(paired_ratio(known["trl"], known["areal"]))

    def by_system(value: Any) -> dict[str, dict[int, float | None]]:
        return {name: {seed: value(systems[name]) for seed, systems in measured.items()} for name in SYSTEMS}

    per_step = ratios(by_system(lambda one: one.step_s))
    to_score = ratios(by_system(lambda one: one.time_to_score(target)))
    return {
        "speedup_per_step": per_step and round(per_step["median"], 3),
        "speedup_to_score": to_score and round(to_score["median"], 3),
        "interval_per_step": per_step,
        "interval_to_score": to_score,
    }


# -- TRL ---------------------------------------------------------------------------------------------------------------


def grpo_arguments(config: RunConfig, ranks: int, output: Path) -> dict[str, Any]:
    """GRPOConfig for the experiment `config` on `ranks` processes.
    Settings that must be equal come first, then those that make TRL fast here (see `benchmarks.peers.trl_grpo`)."""
    training, algorithm = config.training, config.algorithm
    return {
        "seed": config.seed,
        "max_steps": training.steps * training.minibatches,
        "num_generations": algorithm.group_size,
        "per_device_train_batch_size": config.rollout.batch_size // (ranks * training.minibatches),
        "steps_per_generation": training.minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "max_completion_length": config.task.max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": training.beta1,
        "adam_beta2": training.beta2,
        "adam_epsilon": training.adam_eps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.grad_clip,
        "epsilon": algorithm.clip_eps,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(output),
    }


def ranks_of_trl(cores: Sequence[int], case: Case) -> list[list[int]]:
    """Cores of each rank."""
    ranks = case.ranks or len(cores)
    return [list(cores[rank::ranks]) for rank in range(ranks)]


def train_trl(
    config: RunConfig, case: Case, model: Path, folder: Path, cores: Sequence[int]
) -> tuple[Training, dict[str, str]]:
    """Train with TRL; also return the versions of its packages. Raises ProcessError with the end of its log."""
    folder.mkdir(parents=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts(config, case, model)))
    ranks = ranks_of_trl(cores, case)
    job = {
        "model": str(model),
        "prompts": str(folder / "prompts.jsonl"),
        "out": str(folder),
        "cores": ranks,
        "updates": config.training.minibatches,
        "verifier": case.verifier,
        "keep": case.score is not None,
        "grpo": grpo_arguments(config, len(ranks), folder / "output"),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=2))
    with PeakMemory() as memory:
        _launch(folder, len(ranks))
    reports = [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(len(ranks))]
    steps = config.training.steps
    versions = [load_file(file) for file in sorted(folder.glob("step-*.safetensors"))]
    if len(reports[0]["elapsed_s"]) != steps or len(versions) not in (0, steps):
        raise ProcessError(f"TRL finished only {len(reports[0]['elapsed_s'])} of {steps} steps; see {folder}")
    training = Training(
        elapsed_s=tuple(reports[0]["elapsed_s"]),
        reward=tuple(fmean(means) for means in zip(*(report["reward"] for report in reports), strict=True)),
        cpu_s=sum(report["cpu_s"][-1] for report in reports),
        peak_gib=memory.gib,
        versions=tuple(versions),
    )
    return training, reports[0]["versions"]


def prompts(config: RunConfig, case: Case, model: Path) -> list[dict[str, str]]:
    """Prompts of the run in order: the text with special tokens written out, and the gold answers.
    Both systems get the same tokens."""
    tokenizer = Tokenizer.from_folder(model)
    source = open_source(config, tokenizer)
    made = [source.prompt(index) for index in range(config.training.steps * config.groups_per_batch)]
    return [
        {"prompt": tokenizer.decode(prompt.token_ids, special=True), "answer": case.gold(prompt.answer)}
        for prompt in made
    ]


def _launch(folder: Path, ranks: int) -> None:
    """Run the peer's ranks to their end. They end with this process."""
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log = folder / "log.txt"
    with log.open("wb") as output:
        peer = subprocess.Popen(
            [*torchrun, PEER, folder / "job.json"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **CHILD_ENV, "GLOO_SOCKET_IFNAME": "lo"},
            preexec_fn=lambda: process.die_with_parent(signal.SIGTERM),  # torchrun ends its ranks then
        )
        try:
            code = peer.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"TRL timed out after {TIMEOUT_S:g} s; see {log}") from None
        finally:
            peer.terminate()
            peer.wait()
    if code:
        end = " | ".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise ProcessError(f"TRL exited with status {code}; see {log}: {end}")


# -- ours --------------------------------------------------------------------------------------------------------------


def train_areal(config: RunConfig, case: Case, run: RunDir) -> Training:
    """Run the prepared run `run` to its end. If there is a score to reach, keep every published version."""
    keeping = contextlib.nullcontext([]) if case.score is None else kept_versions(run.weights)
    with PeakMemory() as memory, keeping as versions:
        summary = execute(config, run_id=run.info().run_id, log=_harness.tell)
    if case.score is not None and len(versions) != summary.steps:
        raise ProcessError(f"{run.root}: version {len(versions) + 1} was deleted before the benchmark copied it")
    history, steps = _harness.history(config, run.info().run_id), range(1, summary.steps + 1)
    return Training(
        elapsed_s=tuple(history["time/elapsed_s"][step] for step in steps),
        reward=tuple(history["reward/mean"][step] for step in steps),
        cpu_s=sum(span.cpu_s or 0.0 for span in read_timeline(run.timeline)),
        peak_gib=memory.gib,
        bound=summary.bound,
        versions=tuple(versions),
    )


@contextlib.contextmanager
def kept_versions(store: Path) -> Iterator[list[Arrays]]:
    """Context manager that collects the model weights of versions 1, 2, ... from the folder `store`."""
    kept: list[Arrays] = []
    closing = threading.Event()

    def collect() -> None:
        with contextlib.suppress(StorageError):  # not there yet
            while True:
                kept.append(weights.load(weights.read_manifest(weights.version_folder(store, len(kept) + 1))))

    def watch() -> None:
        while not closing.wait(_POLL_S):
            collect()
        collect()

    watching = threading.Thread(target=watch, name="versions", daemon=True)
    watching.start()
    try:
        yield kept
    finally:
        closing.set()
        watching.join()


# -- both --------------------------------------------------------------------------------------------------------------


def score(training: Training, scorer: Scorer, folder: Path, target: float) -> dict[int, float]:
    """Accuracy by step, in order up to the first version that reaches `target`, and of the last version."""
    accuracy: dict[int, float] = {}
    last = len(training.versions)
    for step in range(1, last + 1):
        if step == last or max(accuracy.values(), default=0.0) < target:
            version = weights.publish(folder, step, training.versions[step - 1])
            accuracy[step] = scorer.accuracy(version)
    return accuracy


def measure(case: Case, seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    """Train both systems with every seed and compare them. Raises ArealError if either fails."""
    if not PYTHON.exists():
        raise ConfigError(f"{PYTHON.parents[1].name} is missing; create it with `make bench NAME=trl`")
    with _harness.scratch_runs() if case.scratch else contextlib.nullcontext(["tracking.enabled=false"]) as its:
        return _measure(case, {seed: _config(case, seed, [*its, *overrides]) for seed in seeds})


def _measure(case: Case, configs: Mapping[int, RunConfig]) -> dict[str, Any]:
    seeds, target = list(configs), case.score
    stamp = f"{case.experiment}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = {seed: prepare(_timed(configs[seed]), run_id=f"peer-{stamp}-s{seed}", log=_harness.tell) for seed in seeds}
    some = configs[seeds[0]]
    model = Path(runs[seeds[0]].info().model_path)
    folder = Path(some.state_dir).absolute() / "peers" / stamp
    cores = sorted(os.sched_getaffinity(0))[: some.launch.devices]
    os.sched_setaffinity(0, cores)  # and everything that is started from here
    torch.set_num_threads(1)
    scorer = None if target is None else Scorer(some, str(model))
    measured: dict[int, dict[str, Measurement]] = {}
    packages: dict[str, str] = {}
    for position, seed in enumerate(seeds):
        measured[seed] = {}
        for system in _harness.in_turns(SYSTEMS, position):
            if system == "trl":
                training, packages = train_trl(configs[seed], case, model, folder / f"trl-s{seed}", cores)
            else:
                training = train_areal(_timed(configs[seed]), case, runs[seed])
            accuracy: dict[int, float] = {}
            if scorer is not None and target is not None:
                accuracy = score(training, scorer, folder / f"{system}-s{seed}" / "versions", target)
            one = Measurement(elapsed_s=training.elapsed_s, accuracy=accuracy, told=_told(training))
            measured[seed][system] = one
            _harness.tell(f"seed {seed}: {system}: {json.dumps(_figures(one, target))}")
    base = None if scorer is None else scorer.accuracy(PolicyVersion(version=0, path=str(model), digest=""))
    return {
        **speedups(measured, target),
        "score": target,
        "accuracy_before": base and round(base, 4),
        "seeds": {
            str(seed): {name: _figures(one, target) for name, one in systems.items()}
            for seed, systems in measured.items()
        },
        "versions": {"trl": packages, "areal": own_versions()},
        "cores": len(cores),
        "trl_arguments": grpo_arguments(some, len(ranks_of_trl(cores, case)), Path("output")),
    }


def own_versions() -> dict[str, str]:
    """Versions of this package and of torch, by their JSON names."""
    return {name: importlib.metadata.version(package) for name, package in _OWN.items()}


def _config(case: Case, seed: int, overrides: Sequence[str]) -> RunConfig:
    return compose(case.experiment, ["name=peer", f"seed={seed}", f"training.steps={case.steps}", *overrides])


def _timed(config: RunConfig) -> RunConfig:
    """`config` without evaluation during training, which TRL does not do either."""
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, enabled=False))


def _told(training: Training) -> dict[str, Any]:
    return {
        "reward": [round(mean, 4) for mean in training.reward],
        "cpu_s_per_step": round(training.cpu_s / len(training.elapsed_s), 2),
        "peak_gib": training.peak_gib,
        "bound": training.bound,
    }


def _figures(one: Measurement, target: float | None) -> dict[str, Any]:
    seconds = one.time_to_score(target)
    return {
        "step_s": round(one.step_s, 3),
        "time_to_score_s": None if seconds is None else round(seconds, 2),
        "step_of_score": one.step_of_score(target),
        "accuracy": {str(step): round(accuracy, 4) for step, accuracy in one.accuracy.items()},
        "elapsed_s": [round(value, 2) for value in one.elapsed_s],
        **one.told,
    }


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--models", type=_harness.some_of(list(CASES)), default=list(CASES))
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    parser.add_argument(
        "--steps", type=_harness.positive, help="training steps per model; default: the number of its case"
    )
    parser.add_argument("--score", type=float, help="held-out accuracy to reach, 0 to 1; default: that of each case")
    options = parser.parse_intermixed_args()

    chosen = {name: value for name in ("steps", "score") if (value := getattr(options, name)) is not None}
    cases = {name: dataclasses.replace(CASES[name], **chosen) for name in options.models}
    _harness.report(lambda: {name: measure(case, options.seeds, options.overrides) for name, case in cases.items()})


if __name__ == "__main__":
    main()
