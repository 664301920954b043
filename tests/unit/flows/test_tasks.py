"""Every file of conf/task that names a published data set reads rows of its schema: samples of our own."""

import json
from pathlib import Path

import pytest

from areal_core.environments.source import open_source
from flows.compose import CONF, compose, quoted
from tests.support.words import word_tokenizer

SAMPLES = Path(__file__).parents[2] / "data" / "published"
HELD_OUT = {  # task: gold answers of its sample
    "aime24": ["001"],
    "aime25": ["240"],
    "amc23": ["28.0"],
    "math500": ["\\frac{3}{2}"],
    "minerva": ["6"],
}
TRAINING = {  # task: its sample, another task's that is held out, and gold answers of the first
    "gsm8k": ("gsm8k.jsonl", "../questions.jsonl", {"4", "25"}),
    "deepscaler": ("deepscaler.json", "math500.jsonl", {"25", "60"}),
    "minerva": ("gsm8k.jsonl", "minerva.jsonl", {"4", "25"}),  # whose fields are others than those of what is held out
}
MODEL = ("model=folder", "model.path=/nowhere", "model.context=65536", "training.microbatch_tokens=65536")


def opened(task, path, held_out, *overrides):
    training = f"task.path={'null' if path is None else quoted(str(path))}"
    held_out = f"task.held_out_path={quoted(str(held_out))}"
    config = compose("cpu-async", [*MODEL, f"task={task}", training, held_out, *overrides])
    return open_source(config, word_tokenizer())


@pytest.mark.parametrize("task", HELD_OUT)
def test_benchmark_of_mathematics_is_held_out(task):
    source = opened(task, None, SAMPLES / f"{task}.jsonl")
    assert [prompt.answer for prompt in source.held_out()] == HELD_OUT[task]
    assert source.report.training is None


@pytest.mark.parametrize("task", TRAINING)
def test_mathematics_is_trained_on(task):
    file, held_out, answers = TRAINING[task]
    source = opened(task, SAMPLES / file, SAMPLES / held_out)
    assert {source.prompt(index).answer for index in range(source.report.training.prompts)} == answers


def test_benchmarks_of_code_are_held_out():
    [prompt] = opened("humaneval", None, SAMPLES / "humaneval.jsonl").held_out()
    assert prompt.text == json.loads(prompt.answer)["prompt"]
    assert json.loads(prompt.answer)["entry_point"] == "twice"
    prints, goes_on = opened("livecodebench", None, SAMPLES / "livecodebench.jsonl").held_out()
    assert set(json.loads(prints.answer)) == {"inputs", "outputs"}
    assert set(json.loads(goes_on.answer)) == {"fn_name", "inputs", "outputs"}
    assert prints.text == "Given $n$, print how many steps of 2 reach it, rounded up."
    assert goes_on.text.startswith("Return the smallest $k$ of the numbers, in order.\n\n```python\nclass Solution:")


def test_deepcoder_is_trained_on_with_another_benchmark_held_out():
    fields = ("task.held_out_prompt_field=prompt", "task.held_out_answer_field=test")
    template = "task.held_out_prompt_template='{{ prompt }}'"
    source = opened("deepcoder", SAMPLES / "deepcoder.jsonl", SAMPLES / "humaneval.jsonl", *fields, template)
    prompts = [source.prompt(index) for index in range(5)]
    assert sorted("fn_name" in json.loads(prompt.answer) for prompt in prompts) == [False, False, True, True, True]
    assert sum("```python\nclass Solution:" in prompt.text for prompt in prompts) == 1


def test_every_task_of_published_rows_is_one_of_these():
    tried = {*HELD_OUT, *TRAINING, "humaneval", "livecodebench", "deepcoder"}
    of_rows = {file.stem for file in (CONF / "task").glob("*.yaml") if "rows\n" in file.read_text()}
    assert of_rows - {"rows", "paper"} == tried
