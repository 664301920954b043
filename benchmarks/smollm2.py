"""Does a pretrained model learn a task in natural language on two cores, how well, how fast, in how much memory?

    make bench NAME=smollm2 ARGS="--seeds 1,2 --problems 500"

The experiment `smollm2` for each seed; then its base model and its final one on the same held-out prompts, none of
which has been trained on, as is checked by hash. A list entry a seed:

- `accuracy_before`, `accuracy_after`: greedy, by the task's own verifier
- `lenient_before`, `lenient_after`: of the same completions, those that hold the gold answer as words of their own,
  whatever stands around it: what was learnt beyond the form of an answer
- `minutes`: from the moment the first generation server takes work until the last version is published
- `peak_gib`: memory of all processes of the run at once, of shared pages each one's part, looked at once a second
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.errors import ConfigError
from areal_core.evaluation.records import Record
from areal_core.models.tokenizer import Tokenizer
from areal_core.run.evaluation import evaluate
from areal_core.run.launcher import execute, run_folder
from benchmarks import _harness
from benchmarks._memory import PeakMemory
from flows.benchmarks import benchmark_configs
from flows.compose import compose

_WORD = re.compile(r"[^\W_]+(?:['\u2019.-][^\W_]+)*")


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2])
    parser.add_argument("--problems", type=_harness.positive, default=500)
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: measure(arguments.seeds, arguments.problems, arguments.overrides))


def measure(seeds: Sequence[int], problems: int, overrides: Sequence[str]) -> dict[str, Any]:
    rows = [_of_seed(seed, problems, overrides) for seed in seeds]
    return {**{key: [row[key] for row in rows] for key in rows[0]}, "problems": problems, "seeds": list(seeds)}


def _of_seed(seed: int, problems: int, overrides: Sequence[str]) -> dict[str, Any]:
    with _harness.scratch_runs() as scratch:
        config = compose("smollm2", [*scratch, f"seed={seed}", *overrides])
        with PeakMemory() as memory:
            summary = execute(config, run_id="run", log=lambda line: _harness.tell(f"seed {seed}: {line}"))
        _check_disjoint(config, summary.steps, problems)
        base = run_folder(config, "run").info().model_path
        before, after = (_records(model, config, problems, scratch) for model in (base, "run"))
    return {
        "accuracy_before": _share([record.greedy.right for record in before]),
        "accuracy_after": _share([record.greedy.right for record in after]),
        "lenient_before": _share([_is_said(record) for record in before]),
        "lenient_after": _share([_is_said(record) for record in after]),
        "minutes": round(summary.rl_wall_s / 60, 2),
        "peak_gib": memory.gib,
    }


def _records(model: str, config: RunConfig, problems: int, scratch: Sequence[str]) -> Sequence[Record]:
    task = [f"task.held_out={problems}", f"task.max_new_tokens={config.task.max_new_tokens}"]
    [result] = evaluate(benchmark_configs(model, ["needle"], overrides=[*scratch, *task]), log=_harness.tell)
    return result.records


def _check_disjoint(config: RunConfig, steps: int, problems: int) -> None:
    """No prompt of the run, trained on or under way at its end, is one of those that it is scored on."""
    tokenizer = Tokenizer.from_folder(run_folder(config, "run").info().model_path)
    held_out = compose("smollm2", [f"task.held_out={problems}"])
    scored = {prompt.prompt_id for prompt in open_source(held_out, tokenizer).held_out()}
    source, prompts = open_source(config, tokenizer), (steps + 2 * (config.max_staleness + 1)) * config.groups_per_batch
    if both := scored & {source.prompt(index).prompt_id for index in range(prompts)}:
        raise ConfigError(f"task.held_out: {len(both)} held-out prompts were trained on")


def _is_said(record: Record) -> bool:
    gold, said = (_words(text) for text in (json.loads(record.gold)["answer"], record.greedy.text))
    return any(said[at : at + len(gold)] == gold for at in range(len(said) - len(gold) + 1))


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _share(found: Sequence[bool]) -> float:
    return round(sum(found) / len(found), 4)


if __name__ == "__main__":
    main()
