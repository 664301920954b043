"""Does a pretrained model learn a natural-language task on two cores: how well, how fast, in how much memory?

    make bench NAME=smollm2 ARGS="--seeds 1,2 --problems 500"
    make bench NAME=smollm2 ARGS="--arms full,lora --seeds 1"

For each seed it runs the experiment `smollm2` (trains all weights), `smollm2-lora` (trains an adapter), or both
(`--arms`). It then scores the base model and the final one on the same held-out prompts. Hashes show that no held-out
prompt was trained on. For each arm, a list with an entry per seed:

- `accuracy_before`, `accuracy_after`: greedy, by the verifier of the task
- `lenient_before`, `lenient_after`: share of the same completions that contain the gold answer as separate words. This
  shows learning beyond the form of an answer
- `minutes`: from the first ready generation server to the last published version
- `peak_gib`: memory of all processes of the run at once, sampled once a second; shared pages count proportionally
- `trainer_gib`: peak memory of the trainer's rank 0, as the kernel counts it
- `step_s`: median over the steps of the trainer's computing time in seconds
- `token_us`: the same per trained token, which does not depend on the lengths of other completions
- `version_mib`, `checkpoint_mib`: size of a published version, and of a checkpoint's weights and optimiser
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError
from areal_core.evaluation.scores import Record
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.evaluation import evaluate
from areal_core.run.launcher import execute, run_folder
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.weights import version_folder, weights_file
from benchmarks import _harness
from benchmarks._memory import PeakMemory
from flows.compose import benchmark_configs, compose

_EXPERIMENTS = {"full": "smollm2", "lora": "smollm2-lora"}
_WORD = re.compile(r"[^\W_]+(?:['\u2019.-][^\W_]+)*")


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2])
    parser.add_argument("--problems", type=_harness.positive, default=500)
    parser.add_argument("--arms", type=_arms, default=["full"], help="comma-separated list of full, lora")
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: measure(arguments.arms, arguments.seeds, arguments.problems, arguments.overrides))


def measure(arms: Sequence[str], seeds: Sequence[int], problems: int, overrides: Sequence[str]) -> dict[str, Any]:
    rows = {arm: list[dict[str, Any]]() for arm in arms}
    for seed in seeds:
        for arm in arms:
            rows[arm].append(_of_seed(arm, seed, problems, overrides))
    columns = {arm: {key: [row[key] for row in found] for key in found[0]} for arm, found in rows.items()}
    return {**columns, "problems": problems, "seeds": list(seeds)}


def _arms(text: str) -> list[str]:
    arms = text.split(",")
    if unknown := set(arms) - _EXPERIMENTS.keys():
        raise argparse.ArgumentTypeError(
            f"must be a comma-separated list of {', '.join(_EXPERIMENTS)}, got {', '.join(sorted(unknown))}"
        )
    return arms


def _of_seed(arm: str, seed: int, problems: int, overrides: Sequence[str]) -> dict[str, Any]:
    with _harness.scratch_runs() as scratch:
        config = compose(_EXPERIMENTS[arm], [*scratch, f"seed={seed}", *overrides])
        with PeakMemory() as memory:
            summary = execute(config, run_id="run", log=lambda line: _harness.tell(f"{arm}, seed {seed}: {line}"))
        _check_disjoint(config, summary.steps, problems)
        run, metrics = run_folder(config, "run"), _harness.history(config, "run")
        base = run.info().model_path
        compute, trained = metrics["time/compute_s"], metrics["throughput/trained_tokens_per_s_per_device"]
        tokens = {step: rate * metrics["time/trainer_s"][step] for step, rate in trained.items()}
        version = weights_file(version_folder(run.weights, summary.steps)).stat().st_size
        saved = checkpoint.newest(Storage.open(run.info().checkpoint_url))
        assert saved is not None
        before, after = (_records(model, config, problems, scratch) for model in (base, "run"))
    return {
        "accuracy_before": _share([record.greedy.correct for record in before]),
        "accuracy_after": _share([record.greedy.correct for record in after]),
        "lenient_before": _share([_is_said(record) for record in before]),
        "lenient_after": _share([_is_said(record) for record in after]),
        "minutes": round(summary.rl_wall_s / 60, 2),
        "peak_gib": memory.gib,
        "trainer_gib": round(max(metrics["memory/trainer_peak_gib"].values()), 2),
        "step_s": round(statistics.median(compute.values()), 2),
        "token_us": round(1e6 * statistics.median(compute[step] / count for step, count in tokens.items() if count), 1),
        "version_mib": round(version / 2**20, 1),
        "checkpoint_mib": round(
            sum(saved.files[name].bytes for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)) / 2**20, 1
        ),
    }


def _records(model: str, config: RunConfig, problems: int, scratch: Sequence[str]) -> Sequence[Record]:
    task = [f"task.held_out={problems}", f"task.max_new_tokens={config.task.max_new_tokens}"]
    [result] = evaluate(benchmark_configs(model, ["needle"], overrides=[*scratch, *task]), log=_harness.tell)
    return result.records


def _check_disjoint(config: RunConfig, steps: int, problems: int) -> None:
    """Raise ConfigError if a held-out prompt was trained on or in flight at the end of the run."""
    tokenizer = Tokenizer.from_folder(run_folder(config, "run").info().model_path)
    held_out = compose("smollm2", [f"task.held_out={problems}"])
    scored = {prompt.prompt_id for prompt in open_source(held_out, tokenizer).held_out()}
    source, prompts = open_source(config, tokenizer), (steps + 2 * (config.max_staleness + 1)) * config.groups_per_batch
    if both := scored & {source.prompt(index).prompt_id for index in range(prompts)}:
        raise ConfigError(
            f"task.held_out: must be disjoint from training, but {len(both)} held-out prompts were trained on"
        )


def _is_said(record: Record) -> bool:
    gold, said = (_words(text) for text in (json.loads(record.gold)["answer"], record.greedy.text))
    return any(said[at : at + len(gold)] == gold for at in range(len(said) - len(gold) + 1))


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _share(found: Sequence[bool]) -> float:
    return round(sum(found) / len(found), 4)


if __name__ == "__main__":
    main()
