"""Fields that only make sense together, and what follows from them."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, cast, get_args, get_type_hints

import pytest

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.types import Lora


def loaded(settings: str) -> RunConfig:
    """The configuration of `field=value` pairs, whose values are JSON or plain words."""
    values: dict[str, Any] = {}
    for name, _, text in (pair.partition("=") for pair in settings.split()):
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        values = merge(values, name, value)
    return load(values)


REFUSED = """
generation.temperature=0.0
    generation.temperature: must be at least 0.01, got 0
generation.vllm.arguments='x
    generation.vllm.arguments: must be in shell syntax, got "'x": No closing quotation
generation.engine=vllm generation.temperature=3.0
    generation.temperature: must be at most 2 with engine=vllm, got 3
training.engine=emulated training.lora.rank=8 generation.engine=emulated
    training.lora.rank: must be null where accelerators are emulated, got 8
task.name=rows task.path=p model.path=m
    task.held_out_path: must name a file of prompts for evaluation with task.name=rows
generation.sleep=true
    generation.sleep: must be false with mode=async
generation.engine=vllm generation.servers=3 generation.vllm.tensor_parallel=2 launch.accelerator=cuda launch.devices=6
    launch.devices: must be at least 7 (6 GPUs generate and 1 train), got 6
algorithm.clip_eps_high=0.1
    algorithm.clip_eps_high: must be at least algorithm.clip_eps (0.2), got 0.1
algorithm.behaviour_cap=2.0 algorithm.behaviour_mask_high=5.0
    algorithm.behaviour_cap: must be null with algorithm.behaviour_mask_low or behaviour_mask_high:
algorithm.behaviour_mask_low=5.0 algorithm.behaviour_mask_high=0.5
    algorithm.behaviour_mask_low: must be below algorithm.behaviour_mask_high (0.5), got 5
algorithm.objective=standard algorithm.behaviour_cap=2.0
    algorithm.behaviour_cap: must be null with algorithm.objective=standard, which has no pi_prox / pi_behav
environment.verifier=code
    rollout.reward_timeout_s: must be at least 80 (8 * environment.program_cpu_s) with environment.verifier=code, got 20
training.zero_stage=3
    training.zero_stage: must be 2, the default, with training.engine=torch, which does not shard training state, got 3
training.lora.rank=8 training.lora.targets=q_proj,c_attn
    training.lora.targets: must be of q_proj, k_proj,
algorithm.overlong_cache=113
    algorithm.overlong_cache: must be at most task.max_new_tokens (112), got 113
algorithm.group_size=1
    algorithm.group_size: must be at least 2 with algorithm.advantage=group, got 1
generation.engine=emulated
    training.engine: must be emulated with generation.engine=emulated, got 'torch'
generation.engine=emulated training.engine=emulated stop.score=0.5
    stop.score: must be null when no version is evaluated, got 0.5
launch.address=head
    launch.address: must be an IP address of this machine, got 'head'
training.ranks=2 training.hosts=2 launch.remote_roles=generation
    training.hosts: must be 1 unless other machines run the trainer (launch.remote_roles=trainer or both), got 2
launch.remote_roles=both
    training.hosts: must be at least 2 with launch.remote_roles=both, where the head node is the first
evaluation.servers=0 generation.servers=1
    evaluation.servers: must be at least 1 with generation.servers=1, because 0 borrows a generation server and would
mode=sync evaluation.servers=0 generation.sleep=true stop.score=0.9
    stop.score: must be null with evaluation.servers=0 and generation.sleep=true, because versions are then scored
evaluation.accelerator=cuda
    evaluation.accelerator: must be cpu with launch.accelerator=cpu, got 'cuda'
evaluation.accelerator=cuda evaluation.servers=0 generation.servers=2 launch.accelerator=cuda launch.devices=3
    evaluation.accelerator: must be cpu with evaluation.servers=0, which borrows the run's servers, got 'cuda'
evaluation.accelerator=cuda evaluation.servers=2 generation.servers=1 launch.accelerator=cuda launch.devices=3
    launch.devices: must be at least 4 (1 GPUs generate and 1 train, 2 evaluate), got 3
evaluation.enabled=false stop.score=0.9
    stop.score: must be null when no version is evaluated, got 0.9
rollout.pipeline_depth=2.5
    rollout.pipeline_depth: must be at most max_staleness, 2, got 2.5
algorithm.control=adaptive_kl
    algorithm.kl_coef: must be above 0 with algorithm.control=adaptive_kl, got 0
tracking.uri=https://me:hunter2@mlflow.example.org
    tracking.uri: must hold no user or password
tracking.uri=https://hunter2@mlflow.example.org
    tracking.uri: must hold no user or password
storage.url=s3://key:hunter2@bucket/areal
    storage.url: must hold no user or password
storage.endpoint_url=http://key:hunter2@127.0.0.1:9000
    storage.endpoint_url: must hold no user or password; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
tasks.tools.ratio=0
    tasks.tools.ratio: must be at least 1, got 0
tasks.tools={}
    tasks.tools: must be a group of fields with a task, such as tasks.tools.task.name=arithmetic, got {}
tasks.my-tools.ratio=1
    tasks.my-tools: must be a name of letters, digits and underscores that does not start with a digit, got 'my-tools'
tasks.tools.task.max_operation=4
    tasks.tools.task.max_operation: no such field; did you mean tasks.tools.task.max_operations?
tasks.tools.task.max_operations=four
    tasks.tools.task.max_operations: must be a whole number, got 'four'
tasks.tools.task.name=rows tasks.words.ratio=1 model.path=m
    tasks.tools.task.held_out_path: must name a file of prompts for evaluation with tasks.tools.task.name=rows
tasks.words.task.name=rows tasks.words.task.held_out_path=h.jsonl
    model.path: must be set with tasks.words.task.name=rows, because the embedded model only supports arith
tasks.one.ratio=2 tasks.two.environment.verifier=code
    rollout.reward_timeout_s: must be at least 80 (8 * environment.program_cpu_s) with tasks.two.environment
"""  # settings, and what the message begins with


@pytest.mark.parametrize(("settings", "said"), re.findall(r"^(\S.*)\n    (.*)$", REFUSED, re.M))
def test_a_configuration_that_can_not_work_is_refused_in_one_line(settings: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(settings)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


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


def test_an_adapter_has_a_rank_and_targets() -> None:
    assert load({}).training.lora.adapter is None
    lora = load({"training": {"lora": {"rank": 8, "alpha": 16, "targets": "q_proj, v_proj"}}}).training.lora
    assert lora.adapter == Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj"))
    assert lora.adapter.scale == 2.0


FOLLOWS = """
mode=sync launch.devices=4                                         takes_turns true
mode=sync launch.devices=4 generation.servers=3 training.ranks=2   takes_turns true
mode=sync launch.devices=4 generation.servers=2 training.ranks=2   takes_turns false
mode=async                                                         recomputes_proximal true
mode=sync                                                          recomputes_proximal false
mode=sync algorithm.behaviour_cap=2.0                              recomputes_proximal true
algorithm.objective=standard                                       recomputes_proximal false
algorithm.objective=a3po algorithm.behaviour_cap=2.0 mode=sync     recomputes_proximal false
algorithm.objective=my_package.my_module:my_own                    recomputes_proximal true
mode=async                                                         admits_machines false
launch.address=::1                                                 admits_machines false
launch.address=10.0.0.1                                            admits_machines true
launch.remote_roles=generation training.ranks=1                    admits_machines true
rollout.max_staleness=4 rollout.pipeline_depth=0.5                 pipeline_depth 0.5
mode=sync generation.interruption=keep                             interruption "wait"
launch.accelerator=cuda launch.devices=8                           generation_servers 7
algorithm.objective=cispo algorithm.clip_eps=1.0 algorithm.clip_eps_high=0.5 mode "async"
algorithm.clip_eps_high=0.2 algorithm.overlong_cache=112           mode "async"
tasks.a.task.max_new_tokens=80 tasks.b.task.max_prompt_tokens=30   context 142
algorithm.group_size=1 algorithm.advantage=batch                   mode "async"
"""  # settings, a property and its value; the last ones are allowed, though they may seem wrong


@pytest.mark.parametrize(("settings", "name", "value"), re.findall(r"^(\S.*?) +(\w+) (\S+)$", FOLLOWS, re.M))
def test_what_follows_from_settings(settings: str, name: str, value: str) -> None:
    assert getattr(loaded(settings), name) == json.loads(value)


def test_each_task_of_a_mixture_is_a_run_of_its_own() -> None:
    config = loaded("tasks.b.ratio=3 tasks.b.environment.name=calculator tasks.a.task.max_operations=2 seed=5")
    assert load(config.to_dict()) == config
    a, b = loaded("task.max_operations=2 seed=5"), loaded("environment.name=calculator seed=5")
    assert [*config.by_task.items()] == [("a", a), ("b", b)]
    assert len({config, a, b}) == 3
