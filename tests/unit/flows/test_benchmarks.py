"""From the words of `make evaluate` to a configuration a benchmark; what is wrong with them is one line."""

import pytest

from areal_core.errors import ConfigError
from flows.compose import benchmark_configs


def test_each_benchmark_is_a_task_and_its_held_out_prompts():
    configs = benchmark_configs("m.gguf", ["needle", "rows=it's.jsonl"], samples=4, seed=7)
    assert list(configs) == ["needle", "rows"]
    needle, rows = configs.values()
    assert (needle.task.dataset, needle.model.path, needle.evaluation.samples, needle.seed) == (
        "needle_haystack",
        "m.gguf",
        4,
        7,
    )
    assert (rows.task.name, rows.task.path, rows.task.held_out_path) == ("rows", None, "it's.jsonl")
    assert all(config.mode == "sync" and config.generation_servers == 2 for config in configs.values())


def test_the_name_of_a_run_is_its_final_model(tmp_path):
    final = tmp_path / "runs" / "first" / "final"
    final.mkdir(parents=True)
    [config] = benchmark_configs("first", ["needle"], overrides=[f"state_dir={tmp_path}"]).values()
    assert config.model.path == str(final)
    [other] = benchmark_configs("second", ["needle"], overrides=[f"state_dir={tmp_path}"]).values()
    assert other.model.path == "second"
    [long] = benchmark_configs("x" * 300, ["needle"], overrides=[f"state_dir={tmp_path}"]).values()
    assert long.model.path == "x" * 300


@pytest.mark.parametrize(
    ("benchmarks", "options", "told"),
    [
        ([], {}, r"benchmarks: must name one at least"),
        (["needle", "needle"], {}, r"benchmarks: needle is there twice"),
        (["needles"], {}, r"task: 'needles' .*did you mean needle\?|task: .*needle"),
        (["needle"], {"samples": 0}, r"evaluation\.samples: must be at least 1, got 0"),
        (["needle"], {"overrides": ["task.chat.on=true"]}, r"task\.chat\.on: no such field"),
    ],
)
def test_what_is_wrong_is_named(benchmarks, options, told):
    with pytest.raises(ConfigError, match=f"^({told})"):
        benchmark_configs("m", benchmarks, **options)
