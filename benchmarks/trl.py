"""How fast is it beside TRL? The default experiment and TRL's GRPOTrainer on the same task, in turns on the same cores.

    python -m benchmarks.trl [--seeds 1,2,3] [--steps 25] [--score 0.75]

Both start from the same warmed-up model and get the same prompts in the same order, the same verifier, batch, number of
optimiser updates a batch, optimiser, clipping and limits (`grpo_arguments`), and `launch.devices` cores. TRL runs in
.venv-trl (`make bench NAME=trl` makes it), by `benchmarks.peers.trl_grpo`, whose text says how it was tuned.

A step is 512 completions generated and trained on. What is compared are two systems, not two loops: ours generates and
trains at once on data up to two versions old, packs, and spends nothing on completions without an advantage (a third to
a half of the tokens, as the policy gets good), where TRL takes turns, pads and computes all. Time runs from the first
generation to the last step; loading, model making and evaluation are outside, on both sides: every version is kept and
scored afterwards in the same way on the same held-out prompts. Time to score is the training time of the first
version whose score is at least --score. A speed-up is TRL's time over ours for one seed; the figure printed is the
median over seeds.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file

from areal_core.__main__ import configuration
from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError, ProcessError, StorageError
from areal_core.launch import process
from areal_core.launch.supervisor import CHILD_ENV
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.launcher import execute, prepare
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir
from areal_core.types import PolicyVersion
from benchmarks import _harness
from benchmarks._scoring import Scorer
from flows.comparison.intervals import paired_ratio

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PEER = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
SYSTEMS = ("areal", "trl")
TIMEOUT_S = 1800.0  # for one run of TRL
_POLL_S = 0.05  # a version stays in the store for longer than a step
_LAST_LINES = 6

Arrays = Mapping[str, Any]  # tensor name -> array


@dataclass(frozen=True, kw_only=True)
class Training:
    """Times and versions of a run of either system."""

    elapsed_s: tuple[float, ...]  # since training began, after each step
    versions: tuple[Arrays, ...]  # weights after each step


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One system, one seed."""

    elapsed_s: tuple[float, ...]  # since training began, after each step
    accuracy: Mapping[int, float]  # step -> held-out accuracy, of the steps that were scored

    @property
    def step_s(self) -> float:
        """Mean over all steps, the first included."""
        return self.elapsed_s[-1] / len(self.elapsed_s)

    def step_of_score(self, target: float) -> int | None:
        """The first scored step with at least `target`."""
        return next((step for step, accuracy in sorted(self.accuracy.items()) if accuracy >= target), None)

    def time_to_score(self, target: float) -> float | None:
        """Seconds of training to `step_of_score`."""
        step = self.step_of_score(target)
        return None if step is None else self.elapsed_s[step - 1]


Measurements = Mapping[int, Mapping[str, Measurement]]  # seed -> system -> measurement


def speedups(measured: Measurements, target: float) -> dict[str, Any]:
    """TRL's time over ours: median, interval and its coverage. To the score it is None unless both reached it with
    every seed."""

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


def grpo_arguments(config: RunConfig, output: Path) -> dict[str, Any]:
    """GRPOConfig for the experiment `config`. First what has to be equal, then what makes TRL fast here; why is told
    in `benchmarks.peers.trl_grpo`."""
    training, algorithm, ranks = config.training, config.algorithm, config.launch.devices
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


def train_trl(config: RunConfig, model: Path, folder: Path, cores: Sequence[int]) -> tuple[Training, dict[str, str]]:
    """Train with TRL; also the versions of its packages. Raises ProcessError with the end of its log."""
    folder.mkdir(parents=True)
    source = open_source(config, Tokenizer.from_folder(model))
    prompts = [source.prompt(index) for index in range(config.training.steps * config.groups_per_batch)]
    lines = [json.dumps({"prompt": prompt.text, "answer": prompt.answer}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    job = {
        "model": str(model),
        "prompts": str(folder / "prompts.jsonl"),
        "out": str(folder),
        "cores": list(cores),
        "updates": config.training.minibatches,
        "grpo": grpo_arguments(config, folder / "output"),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=2))
    _launch(folder, len(cores))
    report = json.loads((folder / "report.json").read_text())
    versions = [load_file(file) for file in sorted(folder.glob("step-*.safetensors"))]
    if len(versions) != config.training.steps:
        raise ProcessError(f"TRL made {len(versions)} of {config.training.steps} steps; see {folder}")
    return Training(elapsed_s=tuple(report["elapsed_s"]), versions=tuple(versions)), report["versions"]


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
            raise ProcessError(f"TRL did not end within {TIMEOUT_S:g} s; see {log}") from None
        finally:
            peer.terminate()
            peer.wait()
    if code:
        end = " | ".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise ProcessError(f"TRL exited with code {code}; see {log}: {end}")


# -- ours --------------------------------------------------------------------------------------------------------------


def train_areal(config: RunConfig, run: RunDir) -> Training:
    """Run the prepared run `run` to its end, keeping every version that it publishes."""
    with kept_versions(run.weights) as versions:
        summary = execute(config, run_id=run.info().run_id, log=_harness.tell)
    if len(versions) != summary.steps:
        raise ProcessError(f"version {len(versions) + 1} of {run.root} was gone before it could be kept")
    elapsed_s = _harness.history(config, run.info().run_id)["time/elapsed_s"]
    return Training(elapsed_s=tuple(elapsed_s[step] for step in range(1, summary.steps + 1)), versions=tuple(versions))


@contextlib.contextmanager
def kept_versions(store: Path) -> Iterator[list[Arrays]]:
    """The weights of versions 1, 2, ... that appear in the folder `store`, while the context is open."""
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


def score(training: Training, scorer: Scorer, folder: Path, target: float) -> Measurement:
    """Score versions in their order up to the first one that reaches `target`, and the last one."""
    accuracy: dict[int, float] = {}
    last = len(training.versions)
    for step in range(1, last + 1):
        if step == last or max(accuracy.values(), default=0.0) < target:
            version = weights.publish(folder, step, training.versions[step - 1])
            accuracy[step] = scorer.accuracy(version)
    return Measurement(elapsed_s=training.elapsed_s, accuracy=accuracy)


def measure(seeds: Sequence[int], steps: int, target: float) -> dict[str, Any]:
    """Train both systems with every seed and compare them. Raises ArealError for what goes wrong in either."""
    if not PYTHON.exists():
        raise ConfigError(f"{PYTHON.parents[1].name}: TRL's environment is absent; `make bench NAME=trl` makes it")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    configs = {seed: _config(seed, steps) for seed in seeds}
    runs = {seed: prepare(_timed(configs[seed]), run_id=f"peer-{stamp}-s{seed}", log=_harness.tell) for seed in seeds}
    some = configs[seeds[0]]
    model = Path(runs[seeds[0]].info().model_path)
    folder = Path(some.state_dir).absolute() / "peers" / stamp
    cores = sorted(os.sched_getaffinity(0))[: some.launch.devices]
    os.sched_setaffinity(0, cores)  # and everything that is started from here
    torch.set_num_threads(1)
    scorer = Scorer(some, str(model))
    base = scorer.accuracy(PolicyVersion(version=0, path=str(model), sha256=""))
    measured: dict[int, dict[str, Measurement]] = {}
    packages: dict[str, str] = {}
    for position, seed in enumerate(seeds):
        measured[seed] = {}
        for system in _harness.in_turns(SYSTEMS, position):
            if system == "trl":
                training, packages = train_trl(configs[seed], model, folder / f"trl-s{seed}", cores)
            else:
                training = train_areal(_timed(configs[seed]), runs[seed])
            one = score(training, scorer, folder / f"{system}-s{seed}" / "versions", target)
            measured[seed][system] = one
            _harness.tell(
                f"seed {seed}: {system}: {one.step_s:.2f} s a step, {target:g} after {one.time_to_score(target)} s "
                f"(step {one.step_of_score(target)}), accuracy {one.accuracy}"
            )
    return {
        **speedups(measured, target),
        "score": target,
        "accuracy_before": round(base, 4),
        "seeds": {
            str(seed): {name: _figures(one, target) for name, one in systems.items()}
            for seed, systems in measured.items()
        },
        "versions": {"trl": packages, "areal": {name: importlib.metadata.version(name) for name in ("areal", "torch")}},
        "cores": len(cores),
        "trl_arguments": grpo_arguments(some, Path("output")),
    }


def _config(seed: int, steps: int) -> RunConfig:
    return configuration(None, ["name=peer", f"seed={seed}", f"training.steps={steps}", "tracking.enabled=false"])


def _timed(config: RunConfig) -> RunConfig:
    """`config` without evaluation beside the training, which TRL doesn't do either."""
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, enabled=False))


def _figures(one: Measurement, target: float) -> dict[str, Any]:
    seconds = one.time_to_score(target)
    return {
        "step_s": round(one.step_s, 3),
        "time_to_score_s": None if seconds is None else round(seconds, 2),
        "step_of_score": one.step_of_score(target),
        "accuracy": {str(step): round(accuracy, 4) for step, accuracy in one.accuracy.items()},
        "elapsed_s": [round(value, 2) for value in one.elapsed_s],
    }


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    parser.add_argument("--steps", type=_harness.positive, default=25)
    parser.add_argument("--score", type=float, default=0.75, help="held-out accuracy, 0 to 1")
    options = parser.parse_args()
    _harness.report(lambda: measure(options.seeds, options.steps, options.score))


if __name__ == "__main__":
    main()
