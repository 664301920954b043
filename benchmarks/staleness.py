"""What do stale trajectories cost, and how much of it does the decoupled objective recover?

    python -m benchmarks.staleness [--seeds 1,2,3] [--lags 0,4,8,16] [--steps N] [--out FILE] [--picture FILE]
                                   [field=value ...]

Step k trains version k - 1 on a batch that version max(0, k - 1 - lag) generated completely. One process decodes,
scores and trains in turns, with the parts of a run but without its controller. So the lag is exact, while a run only
bounds it. For a seed, every objective and lag has the same prompts in the same order and the same random numbers for
sampling. All start from the same base model. The accuracy is greedy, over all held-out prompts, after the last step. At
lag 0 both objectives are equal except for rounding, whose size the table shows.

The setting is the default base model and batch (512 completions, groups of 16, 4 minibatches) at a tenth of the default
learning rate. The cost of a lag is the distance that the policy moves in as many steps, so learning must outlast the
longest lag. At the default rate the decoupled objective learns the task within 4 steps, while at lag 8 all batches
still come from the base model. At the lower rate it takes most of 32 steps, and every lag counts. Standard PPO is
slowed, not prevented from learning: its clip range is around a policy that is `lag` versions old, and given enough
steps it learns the task too. At four times the default rate both objectives forget the task again, so a comparison is
impossible.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_core.__main__ import configuration
from areal_core.algorithm.advantages import advantages_of
from areal_core.api.rollouts import trajectory_seed
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import encode_generation
from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError
from areal_core.models.folders import read_weights
from areal_core.models.spec import read_spec
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.folders import base_model
from areal_core.run.preflight import preflight
from areal_core.storage import weights
from areal_core.training.batching.partition import PromptCost, shard
from areal_core.training.engines.engine import TrainingBatch, build_batch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.types import GenerationRequest, PolicyVersion
from benchmarks import _harness
from benchmarks._scoring import Scorer
from tests.support.groups import score_group, unpack_group, whole_completions
from tests.support.offline import OfflineEngine

OBJECTIVES = ("decoupled", "standard")
_SETTING = ("training.steps=32", "training.learning_rate=5e-6", "evaluation.every=8", "tracking.enabled=false")
_OURS = ("seed", "algorithm.objective")  # fields that differ from job to job
_PROCESSES = 2  # jobs at a time
_COLOURS = {"decoupled": "#0072b2", "standard": "#d55e00"}  # of Okabe and Ito: told apart with any colour blindness
_INK = "#222222"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. `config` holds its objective and its seed."""

    lag: int  # versions
    config: RunConfig
    model_path: str  # version 0

    @property
    def name(self) -> str:
        return f"{self.config.algorithm.objective}, lag {self.lag}, seed {self.config.seed}"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of a step. Means are over its loss tokens."""

    step: int
    reward: float  # mean over completions
    ess: float  # of pi_prox / pi_behav (standard: pi_theta / pi_behav), as a share of the tokens
    weight_max: float  # largest of those ratios
    clip_fraction: float
    entropy: float  # nats


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished job."""

    objective: str
    lag: int
    seed: int
    accuracy: tuple[tuple[int, float], ...]  # (step, held-out greedy accuracy), step 0 and the last one included
    steps: tuple[StepRecord, ...]
    wall_s: float

    @property
    def final(self) -> float:
        return self.accuracy[-1][1]


def main() -> None:
    options = _parse()
    _harness.report(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    for file in filter(None, (options.out, options.picture)):
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: must be in an existing folder")  # told now, not after all runs
    jobs = plan(options.seeds, options.lags, options.overrides)
    outcomes = list(_run_all(jobs))
    if options.out:
        options.out.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes]))
    if options.picture:
        draw(outcomes, options.picture)
    return summary(outcomes, jobs[0].config) | {"wall_s": round(time.monotonic() - start, 1)}


def plan(seeds: Sequence[int], lags: Sequence[int], overrides: Sequence[str]) -> list[Job]:
    """Plan all jobs, and make their base model unless it exists. Raises the errors of preflight and warm-up."""
    for override in overrides:
        if (name := override.partition("=")[0]) in _OURS:
            raise ConfigError(f"{name}: must not be given, as the benchmark sets it for each run")
    config = configuration({}, [*_SETTING, *overrides])
    preflight(config)
    model = str(base_model(config, _harness.tell))
    return [
        Job(
            lag=lag,
            config=dataclasses.replace(
                config, seed=seed, algorithm=dataclasses.replace(config.algorithm, objective=objective)
            ),
            model_path=model,
        )
        for seed in seeds
        for lag in lags
        for objective in OBJECTIVES
    ]


# -- one job ---------------------------------------------------------------------------------------------------


def behaviour_version(step: int, lag: int) -> int:
    """Version that generates the batch of `step`: `lag` older than the trained version step - 1, at least 0."""
    return max(0, step - 1 - lag)


def run_job(job: Job) -> Outcome:
    """Train to the last step; score the base, every `evaluation.every` steps and the last version."""
    start, every, last = time.monotonic(), job.config.evaluation.every, job.config.training.steps
    scorer = Scorer(job.config, job.model_path)
    steps: list[StepRecord] = []
    with tempfile.TemporaryDirectory(prefix="areal-staleness-") as folder:
        training = LaggedTraining(job, Path(folder))
        accuracy = [(0, scorer.accuracy(training.versions[0]))]
        for step in range(1, last + 1):
            steps.append(training.step())
            if step % every == 0 or step == last:
                accuracy.append((step, scorer.accuracy(training.versions[-1])))
                _harness.tell(
                    f"{job.name}: step {step}/{last}, reward {steps[-1].reward:.3f}, accuracy {accuracy[-1][1]:.3f}"
                )
    return Outcome(
        objective=job.config.algorithm.objective,
        lag=job.lag,
        seed=job.config.seed,
        accuracy=tuple(accuracy),
        steps=tuple(steps),
        wall_s=time.monotonic() - start,
    )


class LaggedTraining:
    """Generation and training in turns, generation exactly `lag` versions behind. `store` holds the versions."""

    def __init__(self, job: Job, store: Path) -> None:
        config, task = job.config, job.config.task
        self._job, self._config, self._store = job, config, store
        self._spec = read_spec(job.model_path)
        base = read_weights(job.model_path, self._spec)
        self._source = open_source(config, Tokenizer.from_folder(job.model_path))
        self._generator = OfflineEngine(
            self._spec,
            base,
            slots=config.generation.slots,
            context=min(self._spec.context, task.max_prompt_tokens + task.max_new_tokens),
        )
        self._trainer = TorchEngine(self._spec, base, config.training, config.algorithm)
        self.versions = [PolicyVersion(version=0, path=job.model_path, digest="")]  # oldest first

    def step(self) -> StepRecord:
        """Make the next version. Raises DivergenceError."""
        step = len(self.versions)
        behaviour = behaviour_version(step, self._job.lag)
        self._load(behaviour)
        scored = self._roll_out(step)
        batch = self._build(step, scored)
        assert (batch.versions[batch.loss_mask] == behaviour).all()
        proximal = self._trainer.proximal_logprobs(batch) if self._config.algorithm.takes_proximal else None
        stats = self._trainer.train_step(batch, proximal)
        self.versions.append(weights.publish(self._store, step, self._trainer.weights()))
        return StepRecord(
            step=step,
            reward=statistics.fmean(reward for group in scored for reward in group.summary.rewards),
            ess=stats.metrics.get("policy/ess", 1.0),
            weight_max=stats.metrics.get("policy/importance_weight_max", 1.0),
            clip_fraction=stats.metrics.get("loss/clip_fraction", 0.0),
            entropy=stats.metrics.get("policy/entropy", 0.0),
        )

    def _load(self, version: int) -> None:
        if version != self._generator.version:
            tensors = {name: torch.from_numpy(array) for name, array in weights.load(self.versions[version]).items()}
            self._generator.swap(self._generator.prepare(tensors), version)

    def _roll_out(self, step: int) -> list[ScoredGroup]:
        """The groups of a step in the order of their prompts, which are the same for all objectives and lags."""
        config, size = self._config, self._config.groups_per_batch
        prompts = [self._source.prompt(index) for index in range((step - 1) * size, step * size)]
        requests = [
            GenerationRequest(
                request_id=f"group-{prompt.index}",
                token_ids=prompt.token_ids,
                n=config.algorithm.group_size,
                max_tokens=config.task.max_new_tokens,
                seed=trajectory_seed(config.seed, prompt.index, 0),
                stop_token_ids=self._spec.eos_token_ids,
            )
            for prompt in prompts
        ]
        completions = self._generator.generate(requests)
        return [
            score_group(
                config,
                self._job.model_path,
                prompt,
                whole_completions(encode_generation(request, group), len(group)),
            )
            for prompt, request, group in zip(prompts, requests, completions, strict=True)
        ]

    def _build(self, step: int, scored: Sequence[ScoredGroup]) -> TrainingBatch:
        config = self._config
        summaries = [group.summary for group in scored]
        shares = shard(
            [[PromptCost(0, summary.lengths, range(len(summary.lengths)))] for summary in summaries],
            config.training.minibatches,
            1,
            seed=config.seed,
            step=step,
        )
        return build_batch(
            step,
            shares[0],
            {index: unpack_group(group.payload, group.summary) for index, group in enumerate(scored)},
            advantages_of(summaries, config.algorithm, config.task.max_new_tokens),
            capacity=config.training.microbatch_tokens,
            algorithm=config.algorithm,
            max_new_tokens=config.task.max_new_tokens,
        )


# -- all jobs --------------------------------------------------------------------------------------------------


def _run_all(jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Run jobs in processes of one thread each; return outcomes in the order in which they finish.
    After the first failure no further job starts."""
    with _harness.processes(_PROCESSES) as pool:
        try:
            for done, future in enumerate(as_completed([pool.submit(run_job, job) for job in jobs]), start=1):
                outcome = future.result()
                _harness.tell(f"{done} of {len(jobs)} runs finished, the last one in {outcome.wall_s:.0f} s")
                yield outcome
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


# -- results ---------------------------------------------------------------------------------------------------


def by_seed(outcomes: Sequence[Outcome]) -> dict[str, dict[int, dict[int, float]]]:
    """Last accuracies as [objective][lag][seed], lags and seeds ascending."""
    table: dict[str, dict[int, dict[int, float]]] = {}
    for outcome in sorted(outcomes, key=lambda each: (each.objective, each.lag, each.seed)):
        table.setdefault(outcome.objective, {}).setdefault(outcome.lag, {})[outcome.seed] = outcome.final
    return table


def summary(outcomes: Sequence[Outcome], config: RunConfig) -> dict[str, Any]:
    """The result as JSON values: mean accuracy by objective and lag, and its basis."""
    table = by_seed(outcomes)
    means = {
        objective: {str(lag): round(statistics.fmean(seeds.values()), 4) for lag, seeds in lags.items()}
        for objective, lags in table.items()
    }
    return means | {
        "by_seed": {
            objective: {
                str(lag): {str(seed): round(value, 4) for seed, value in seeds.items()} for lag, seeds in lags.items()
            }
            for objective, lags in table.items()
        },
        "base_accuracy": round(outcomes[0].accuracy[0][1], 4),
        "seeds": sorted({outcome.seed for outcome in outcomes}),
        "steps": config.training.steps,
        "learning_rate": config.training.learning_rate,
        "minibatches": config.training.minibatches,
        "batch_size": config.rollout.batch_size,
        "group_size": config.algorithm.group_size,
        "behaviour_cap": config.algorithm.behaviour_cap,
        "held_out": config.task.held_out,
    }


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draw accuracy over lag: a line through the means, a point for each seed, the base model dotted."""
    from matplotlib.figure import Figure  # half a second of imports that the jobs' processes do without
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.0, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    for objective, lags in by_seed(outcomes).items():
        colour = _COLOURS[objective]
        means = [statistics.fmean(seeds.values()) for seeds in lags.values()]
        axes.plot(list(lags), means, color=colour, linewidth=2.2)
        points = [(lag, value) for lag, seeds in lags.items() for value in seeds.values()]
        axes.scatter(*zip(*points, strict=True), color=colour, s=30, alpha=0.55, linewidths=0, zorder=3)
        axes.annotate(
            objective,
            (max(lags), means[-1]),
            (10, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
        )
    base = outcomes[0].accuracy[0][1]
    axes.axhline(base, color=_INK, linewidth=1, linestyle=":")
    axes.annotate(
        "base model", (1, base), (-4, -12), ("axes fraction", "data"), "offset points", ha="right", color=_INK
    )
    axes.set_title(
        f"After {outcomes[0].accuracy[-1][0]} steps. Points: seeds. Lines: means over seeds.", loc="left", fontsize=10
    )
    axes.set_xlabel("lag: policy versions between generation and training")
    axes.set_ylabel("held-out greedy accuracy")
    lags = sorted({outcome.lag for outcome in outcomes})
    axes.set_xticks(lags)
    axes.set_xlim(lags[0] - 0.5, lags[-1] + 3)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _parse() -> argparse.Namespace:
    parser = _harness.parser(__doc__)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    parser.add_argument("--lags", type=_harness.numbers, default=[0, 4, 8, 16], help="in versions")
    parser.add_argument("--steps", type=int, help="training.steps")
    parser.add_argument("--out", type=Path, help="write the curves of all runs to this file, as JSON")
    parser.add_argument("--picture", type=Path, help="draw accuracy over lag into this file")
    options = parser.parse_intermixed_args()
    if options.steps is not None:
        options.overrides.append(f"training.steps={options.steps}")
    return options


if __name__ == "__main__":
    main()
