"""Fields that only make sense together, and what follows from them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import pytest
import torch

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.types import Lora

EMULATED = {"generation": {"engine": "emulated"}, "training": {"engine": "emulated"}}


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"top_p": 0.9}, "generation.top_p: no such field"),
        ({"temperature": 0.0}, "generation.temperature: must be at least 0.01, got 0.0"),
        ({"interruption": "abort"}, "generation.interruption: must be one of recompute, resubmit, keep, wait, got"),
        ({"vllm": {"arguments": "--name 'x"}}, 'generation.vllm.arguments: No closing quotation, in "--name \'x"'),
        ({"vllm": {"memory_share": 1.5}}, "generation.vllm.memory_share: must be "),
        ({"engine": "vllm", "temperature": 3.0}, "generation.temperature: vllm takes 2 at most, got 3"),
    ],
)
def test_what_is_wrong_with_generation_is_one_line_that_names_it(generation: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"generation": generation})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def numbers(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, type]]:
    """The dotted names of all numeric fields of a configuration, and their types."""
    for name, hint in get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from numbers(cast(type[Any], hint), f"{prefix}{name}.")
        for kind in (int, float):
            if kind in (get_args(hint) or (hint,)):
                yield prefix + name, kind


@pytest.mark.parametrize(("name", "kind"), [*numbers(RunConfig)])
def test_a_number_that_nothing_can_hold_is_refused(name: str, kind: type) -> None:
    for value in (10**20, -(10**20)) if kind is int else (10**400, -(10**400)):
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)}: must be (finite|at (most|least)|greater than)"):
            load(merge({}, name, value))


def test_the_largest_seed_is_one_for_torch() -> None:
    torch.Generator().manual_seed(load({"seed": 2**63 - 1}).seed)


def test_numbers_of_numpy_are_plain_ones() -> None:
    config = load(
        {"seed": np.int64(3), "training": {"learning_rate": np.float32(0.5)}, "stop": {"score": np.float64(1)}}
    )
    found = config.seed, config.training.learning_rate, config.stop.score
    assert [(type(value), value) for value in found] == [(int, 3), (float, 0.5), (float, 1.0)]


def test_no_score_stops_a_run_that_has_none() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"evaluation": {"enabled": False}, "stop": {"score": 0.9}})
    assert str(caught.value) == "stop.score: must be null with evaluation.enabled=false, got 0.9"


def test_the_pipeline_is_as_deep_as_the_bound_unless_it_is_said_and_never_deeper() -> None:
    assert load({"rollout": {"max_staleness": 4}}).pipeline_depth == 4
    assert load({"rollout": {"max_staleness": 4, "pipeline_depth": 0.5}}).pipeline_depth == 0.5
    for fields, eta in (
        ({"rollout": {"pipeline_depth": 2.5}}, 2),
        ({"mode": "sync", "rollout": {"pipeline_depth": 1}}, 0),
    ):
        with pytest.raises(ConfigError, match=rf"^rollout.pipeline_depth: must be at most max_staleness, {eta}, got "):
            load(fields)


def test_an_adapter_has_a_rank_and_targets() -> None:
    assert load({}).training.lora.adapter is None
    lora = load({"training": {"lora": {"rank": 8, "alpha": 16, "targets": "q_proj, v_proj"}}}).training.lora
    assert lora.adapter == Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj"))
    assert lora.adapter.scale == 2.0
    for targets in ("", "q_proj,,v_proj"):
        with pytest.raises(ConfigError, match=r"^training.lora.targets: must be names of linear layers with commas"):
            load({"training": {"lora": {"rank": 8, "targets": targets}}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"generation": {"engine": "emulated"}, "training": {"engine": "emulated", "lora": {"rank": 8}}},
            "training.lora.rank: must be null where accelerators are emulated, got 8",
        ),
        (
            {"generation": {"engine": "vllm", "interruption": "keep"}},
            "generation.interruption: must be recompute, resubmit or wait with training.lora .*got 'keep'",
        ),
        (
            {"training": {"lora": {"rank": 8, "targets": "q_proj, c_attn"}}},
            "training.lora.targets: must be of q_proj, k_proj, .*, the embedded model's linear layers, got 'c_attn'",
        ),
    ],
)
def test_what_does_not_go_with_an_adapter(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        load({"training": {"lora": {"rank": 8}}, "algorithm": {"group_size": 4}} | changes)


@pytest.mark.parametrize("interruption", ["recompute", "resubmit", "keep", "wait"])
def test_nothing_is_interrupted_in_synchronous_mode(interruption: str) -> None:
    generation = {"interruption": interruption}
    assert load({"mode": "async", "generation": generation}).interruption == interruption
    assert load({"mode": "sync", "generation": generation}).interruption == "wait"


@pytest.mark.parametrize(
    ("mode", "generation", "training", "takes_turns"),
    [
        ("sync", {}, {}, True),
        ("sync", {"servers": 3}, {"ranks": 2}, True),
        ("sync", {"servers": 2}, {"ranks": 2}, False),
        ("async", {"servers": 3}, {"ranks": 1}, False),
    ],
)
def test_synchronous_roles_take_turns_unless_each_has_its_own_devices(
    mode: str, generation: dict[str, int], training: dict[str, int], takes_turns: bool
) -> None:
    fields = {"mode": mode, "generation": generation, "training": training, "launch": {"devices": 4}}
    assert load(fields).takes_turns == takes_turns


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"name": "rows", "path": "p"}, "task.held_out_path: task.name=rows needs a file of prompts to evaluate with"),
        (
            {"success_field": "rate", "success_path": "rates.jsonl"},
            "task.success_path: must be null with task.success_field, got 'rates.jsonl'",
        ),
        ({"min_success": 0.05}, "task.success_field: must name rates for task.min_success and task.max_success to"),
        (
            {"success_field": "rate", "min_success": 0.9, "max_success": 0.1},
            "task.min_success: must be at most task.max_success (0.1), got 0.9",
        ),
    ],
)
def test_a_task_that_can_not_be_read_is_refused(task: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"task": task, "model": {"path": "m"}})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tracking": {"uri": "https://me:hunter2@mlflow.example.org"}}, "tracking.uri: must hold no user or password"),
        ({"tracking": {"uri": "https://token@mlflow.example.org"}}, "tracking.uri: must hold no user or password"),
        ({"storage": {"url": "s3://key:hunter2@bucket/areal"}}, "storage.url: must hold no user or password"),
        (
            {"storage": {"endpoint_url": "http://key:hunter2@127.0.0.1:9000"}},
            "storage.endpoint_url: must hold no user or password; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are for",
        ),
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(values)
    assert str(caught.value).startswith(said)
    assert "hunter2" not in str(caught.value)
    assert "token@" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"generation": {"sleep": True}}, "generation.sleep: must be false with mode=async"),
        (
            {"launch": {"accelerator": "cuda", "devices": 1}},
            "launch.devices: must be at least 2 (1 GPUs generate and 1",
        ),
        (
            {
                "generation": {"engine": "vllm", "servers": 3, "vllm": {"tensor_parallel": 2}},
                "launch": {"accelerator": "cuda", "devices": 6},
            },
            "launch.devices: must be at least 7 (6 GPUs generate and 1 train), got 6",
        ),
    ],
)
def test_what_can_not_work_together_on_gpus_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(values)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"clip_eps_high": 0.1}, "algorithm.clip_eps_high: must be at least algorithm.clip_eps (0.2), got 0.1"),
        (
            {"behaviour_cap": 2.0, "behaviour_mask_high": 5.0},
            "algorithm.behaviour_cap: must be null with algorithm.behaviour_mask_low or behaviour_mask_high: ",
        ),
        (
            {"behaviour_mask_low": 5.0, "behaviour_mask_high": 0.5},
            "algorithm.behaviour_mask_low: must be below algorithm.behaviour_mask_high (0.5), got 5",
        ),
        (
            {"objective": "standard", "behaviour_cap": 2.0},
            "algorithm.behaviour_cap: must be null with algorithm.objective=standard, which has no pi_prox / pi_behav",
        ),
        (
            {"objective": "standard", "behaviour_mask_low": 0.5},
            "algorithm.behaviour_mask_low: must be null with algorithm.objective=standard, which has no pi_prox",
        ),
        (
            {"objective": "standard", "behaviour_mask_high": 5.0},
            "algorithm.behaviour_mask_high: must be null with algorithm.objective=standard, which has no pi_prox",
        ),
        (
            {"objective": "cispo", "behaviour_cap": 2.0},
            "algorithm.behaviour_cap: must be null with algorithm.objective=cispo, which has no pi_prox / pi_behav",
        ),
        ({"overlong_cache": 113}, "algorithm.overlong_cache: must be at most task.max_new_tokens (112), got 113"),
        ({"kl_coef": -0.1}, "algorithm.kl_coef: must be at least 0.0, got -0.1"),
        ({"group_size": 1}, "algorithm.group_size: must be at least 2 with algorithm.advantage=group, got 1"),
        (
            {"group_size": 1, "advantage": "group_mean"},
            "algorithm.group_size: must be at least 2 with algorithm.advantage=group_mean, got 1",
        ),
    ],
)
def test_what_is_wrong_with_an_algorithm_is_one_line_that_names_it(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"algorithm": algorithm})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_algorithms_that_may_seem_wrong_and_are_not() -> None:
    load({"algorithm": {"kl_estimator": "k1"}})
    load({"algorithm": {"objective": "a3po"}, "mode": "sync"})
    load({"algorithm": {"objective": "a3po", "behaviour_cap": 2.0}})
    load({"algorithm": {"objective": "gspo", "behaviour_mask_low": 0.9, "behaviour_mask_high": 1.1}})
    load({"algorithm": {"objective": "cispo", "clip_eps": 1.0, "clip_eps_high": 0.5}})  # no lower bound
    load({"algorithm": {"clip_eps_high": 0.2, "overlong_cache": 112}})
    load({"algorithm": {"group_size": 1, "advantage": "batch"}})


@pytest.mark.parametrize(
    ("values", "recomputes"),
    [
        ({}, True),
        ({"mode": "sync"}, False),  # nothing is stale
        (
            {"mode": "sync", "algorithm": {"behaviour_cap": 2.0}},
            True,
        ),  # the deviation between servers and trainer is bounded
        ({"mode": "sync", "algorithm": {"behaviour_mask_low": 0.5}}, True),
        ({"algorithm": {"objective": "standard"}}, False),
        ({"algorithm": {"objective": "a3po"}}, False),
        ({"algorithm": {"objective": "a3po", "behaviour_cap": 2.0}, "mode": "sync"}, False),
        ({"algorithm": {"objective": "gspo"}}, True),
        ({"algorithm": {"objective": "gspo"}, "mode": "sync"}, False),
        ({"algorithm": {"objective": "cispo"}}, False),
        ({"algorithm": {"objective": "my_package.my_module:my_own"}}, True),
        ({"algorithm": {"objective": "reinforce"}}, True),
        ({"algorithm": {"objective": "reinforce"}, "mode": "sync"}, False),
    ],
)
def test_a_proximal_policy_is_recomputed_where_the_objective_weighs_with_it(
    values: dict[str, Any], recomputes: bool
) -> None:
    assert load(values).recomputes_proximal == recomputes


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"rollout": {"dynamic_sampling": True}, "algorithm": {"group_size": 1, "advantage": "batch"}},
            "algorithm.group_size: must be at least 2 with rollout.dynamic_sampling=true, got 1",
        ),
        (
            {"rollout": {"dynamic_sampling": True}, **EMULATED},
            "rollout.dynamic_sampling: must be false where accelerators are emulated and nothing is learnt, got true",
        ),
        (
            {"algorithm": {"kl_coef": 0.1}, **EMULATED},
            "algorithm.kl_coef: must be 0 where accelerators are emulated and nothing is learnt, got 0.1",
        ),
        (
            {"algorithm": {"entropy_coef": 0.1}, **EMULATED},
            "algorithm.entropy_coef: must be 0 where accelerators are emulated and nothing is learnt, got 0.1",
        ),
    ],
)
def test_what_needs_completions_that_differ_is_refused_where_none_do(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(values)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"launch": {"remote_roles": "evaluator"}},
            "launch.remote_roles: must be one of none, generation, trainer, both",
        ),
        ({"launch": {"address": "head"}}, "launch.address: must be an IP address of this machine, got 'head'"),
        ({"launch": {"address": "0.0.0.0"}}, "launch.address: must be an IP address of this machine, got '0.0.0.0'"),
        ({"training": {"hosts": 0}}, "training.hosts: must be at least 1, got 0"),
        (
            {"training": {"ranks": 2, "hosts": 2}, "launch": {"remote_roles": "generation"}},
            "training.hosts: must be 1 unless other machines train (launch.remote_roles=trainer or both), got 2",
        ),
        (
            {"launch": {"remote_roles": "both"}},
            "training.hosts: must be at least 2 with launch.remote_roles=both, where the head node is the first "
            "machine that trains, got 1",
        ),
        (
            {"training": {"ranks": 3, "hosts": 2}, "launch": {"remote_roles": "trainer"}},
            "training.ranks: must be a multiple of training.hosts (2), got 3",
        ),
        ({"launch": {"files_port": 65536}}, "launch.files_port: must be at most 65535, got 65536"),
    ],
)
def test_what_is_wrong_with_several_machines_is_one_line_that_names_it(
    groups: dict[str, dict[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(groups)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"evaluation": {"servers": 0}, "generation": {"servers": 1}},
            "evaluation.servers: must be at least 1 with one generation server, which the run can't spare, got 0",
        ),
        (
            {"mode": "sync", "evaluation": {"servers": 0}, "generation": {"sleep": True}, "stop": {"score": 0.9}},
            "stop.score: must be null with evaluation.servers=0 and generation.sleep=true, as versions are scored once "
            "the run has ended, got 0.9",
        ),
        (
            {
                "mode": "sync",
                "evaluation": {"servers": 0},
                "generation": {"sleep": True},
                "training": {"keep_best": True},
            },
            "training.keep_best: must be false with evaluation.servers=0 and generation.sleep=true, as versions are "
            "scored once the run has ended, got true",
        ),
        (
            {"evaluation": {"accelerator": "cuda"}},
            "evaluation.accelerator: must be cpu with launch.accelerator=cpu, got 'cuda'",
        ),
        (
            {
                "evaluation": {"accelerator": "cuda", "servers": 0},
                "generation": {"servers": 2},
                "launch": {"accelerator": "cuda", "devices": 3},
            },
            "evaluation.accelerator: must be cpu with evaluation.servers=0, whose servers are the run's, got 'cuda'",
        ),
        (
            {"evaluation": {"engine": "emulated"}},
            "evaluation.engine: must be one of embedded, vllm, or an import path, package.module:name, got 'emulated'",
        ),
        (
            {
                "evaluation": {"accelerator": "cuda", "servers": 2},
                "generation": {"servers": 1},
                "launch": {"accelerator": "cuda", "devices": 3},
            },
            "launch.devices: must be at least 4 (1 GPUs generate and 1 train, 2 score versions), got 3",
        ),
    ],
)
def test_what_can_not_score_versions_is_one_line_that_names_it(groups: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(groups)
    assert str(caught.value) == said


def test_the_evaluators_gpus_are_not_the_runs() -> None:
    launch = {"accelerator": "cuda", "devices": 8}
    assert load({"launch": launch, "evaluation": {"accelerator": "cuda", "servers": 2}}).generation_servers == 5
    assert load({"launch": launch}).generation_servers == 7  # the evaluator's are on cores


def test_what_follows_from_remote_roles() -> None:
    assert load({}).remote_roles == frozenset()
    assert load({"launch": {"remote_roles": "generation"}}).remote_roles == {"generation"}
    config = load({"training": {"ranks": 4, "hosts": 2}, "launch": {"remote_roles": "both", "address": "fd00::1"}})
    assert config.remote_roles == {"generation", "trainer"}
    assert config.ranks_per_host == 2


@pytest.mark.parametrize(
    ("launch", "admits"),
    [({}, False), ({"address": "::1"}, False), ({"remote_roles": "generation"}, True), ({"address": "10.0.0.1"}, True)],
)
def test_other_machines_may_join_where_a_role_is_theirs_or_they_reach_the_head_node(
    launch: dict[str, Any], admits: bool
) -> None:
    assert load({"launch": launch}).admits_machines is admits
