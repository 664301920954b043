"""Every experiment composes, and everything that can be wrong with an override is one line that names the field."""

import dataclasses

import pytest

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from flows.compose import CONF, compose, experiments

FILES = ["model.path=m", "task.path=t", "task.held_out_path=h"]  # what only the user can know
WITH_FILES = [name for name in experiments() if name.startswith(("gpu-", "paper-"))]


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_composes_under_its_own_name(experiment: str) -> None:
    config = compose(experiment, FILES if experiment in WITH_FILES else [])
    assert config.label in (experiment, f"{experiment}-{config.mode}")


@pytest.mark.parametrize("experiment", WITH_FILES)
@pytest.mark.parametrize("missing", FILES)
def test_an_experiment_asks_for_the_files_it_needs(experiment: str, missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(experiment, [given for given in FILES if given != missing])
    name = missing.partition("=")[0]
    assert str(caught.value) == f"{name}: must be given, as {name}=VALUE"


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("experiment", "eta", "machines", "steps"),
    [
        ("paper-1.5b-math", 8, 16, 250),
        ("paper-7b-math", 8, 24, 250),
        ("paper-14b-code", 4, 32, 80),
        ("paper-32b-code", 4, 48, 60),
    ],
)
def test_the_papers_runs_have_the_papers_settings(
    experiment: str, mode: str, eta: int, machines: int, steps: int
) -> None:
    """Tables 1 and 3 of the paper. In synchronous mode all GPUs generate, then all train."""
    config = compose(experiment if mode == "async" else f"{experiment}-sync", FILES)
    algorithm, training, task = config.algorithm, config.training, config.task
    per_server = config.devices_per_server
    if mode == "async":
        assert (config.max_staleness, config.interruption, config.sleeps) == (eta, "recompute", False)
        assert config.generation_servers * per_server == 6 * machines  # 75 %
        assert (training.ranks, training.hosts) == (2 * machines, machines // 4)
    else:
        assert (config.max_staleness, config.interruption, config.sleeps) == (0, "wait", True)
        assert config.generation_servers * per_server == training.ranks == 8 * machines
        assert training.hosts == machines
    assert (config.mode, config.ranks_per_host) == (mode, 8)
    assert (config.rollout.batch_size, algorithm.group_size, training.minibatches) == (512 * 16, 16, 4)
    assert (config.launch.devices, config.launch.devices_per_host, training.steps) == (8 * machines, 8, steps)
    assert (task.max_prompt_tokens, task.max_new_tokens, training.microbatch_tokens) == (1024, 27648, 32768)
    assert (algorithm.objective, algorithm.advantage, algorithm.clip_eps) == ("decoupled", "batch", 0.2)
    assert (algorithm.reward_correct, algorithm.reward_wrong) == (5.0, -5.0)
    assert (training.learning_rate, training.weight_decay, training.warmup_steps) == (2e-5, 0.05, 1)
    assert (training.beta1, training.beta2, training.adam_eps, training.grad_clip) == (0.9, 0.95, 1e-5, 1.0)
    assert (training.engine, training.zero_stage, training.dtype) == ("deepspeed", 3, "bfloat16")
    assert training.checkpoint_activations
    assert config.generation.temperature == 1.0


def test_the_small_set_up_is_the_papers() -> None:
    """Table 7."""
    config = compose("paper-small", FILES)
    assert (config.rollout.batch_size, config.groups_per_batch) == (1024, 64)
    assert (config.generation_servers, config.training_ranks, config.launch.devices) == (6, 2, 8)
    assert config.task.max_prompt_tokens + config.task.max_new_tokens == config.model.context == 8192


def test_one_gpu_is_shared_in_turns() -> None:
    config = compose("gpu-shared", FILES)
    assert (config.mode, config.sleeps) == ("sync", True)
    assert (config.generation_servers, config.training_ranks, config.launch.devices) == (1, 1, 1)


def test_four_processes_stand_for_512_accelerators_and_the_whole_batch() -> None:
    config = compose("emulated-512")
    accelerators = config.emulation.replicas * config.emulation.tensor_parallel
    assert (config.generation_servers * accelerators, config.training_ranks * accelerators) == (384, 128)
    assert config.emulated_cluster == "qwen-1.5b on 512 h800, 1 s in one, 128 tokens as one"
    assert (config.rollout.batch_size, config.groups_per_batch) == (8192, 512)


def test_default_experiment_is_the_schema_itself() -> None:
    assert compose("cpu-async") == RunConfig()


def test_synchronous_experiment_differs_only_in_mode() -> None:
    assert compose("cpu-sync") == dataclasses.replace(RunConfig(), mode="sync")


def test_every_group_named_by_the_design_has_a_choice() -> None:
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert groups == {
        *(
            "model",
            "environment",
            "task",
            "algorithm",
            "generation",
            "training",
            "storage",
            "tracking",
            "devices",
            "provision",
            "experiment",
            "emulation",
            "paper",
        )
    }


@pytest.mark.parametrize(
    ("override", "look"),
    [
        ("training.steps=7", lambda c: c.training.steps == 7),
        ("stop.score=0.7", lambda c: c.stop.score == 0.7),
        ("stop.score=null", lambda c: c.stop.score is None),
        ("algorithm=standard", lambda c: c.algorithm.objective == "standard"),
        ("algorithm=gspo", lambda c: (c.algorithm.clip_eps, c.algorithm.clip_eps_high) == (3e-4, 4e-4)),
        ("algorithm=cispo", lambda c: (c.algorithm.objective, c.algorithm.clip_eps) == ("cispo", 1.0)),
        ("algorithm=a3po", lambda c: c.algorithm.objective == "a3po"),
        ("algorithm=grpo", lambda c: (c.algorithm.loss_mean, c.algorithm.kl_coef) == ("sequence", 0.04)),
        ("algorithm=dr_grpo", lambda c: (c.algorithm.loss_mean, c.algorithm.advantage) == ("constant", "group_mean")),
        ("algorithm=rloo", lambda c: (c.algorithm.objective, c.algorithm.advantage) == ("reinforce", "leave_one_out")),
        ("algorithm=dapo", lambda c: c.rollout.dynamic_sampling and c.algorithm.clip_eps_high == 0.28),
        ("algorithm=tis", lambda c: c.algorithm.behaviour_cap == 2.0),
        ("algorithm=icepop", lambda c: c.algorithm.behaviour_mask_low == 0.5),
        ("training=paper", lambda c: c.training.learning_rate == 2e-5),
        ("generation=deterministic", lambda c: c.generation.deterministic),
        ("tracking=off", lambda c: not c.tracking.enabled),
        ("devices=cores", lambda c: c.launch.devices == 2),
        ("launch.devices=4", lambda c: c.launch.devices == 4),
        ("seed=9", lambda c: c.seed == 9),
        ("storage.url=s3://bucket/prefix", lambda c: c.storage.url == "s3://bucket/prefix"),
        ("tracking.uri='http://127.0.0.1:5000'", lambda c: c.tracking.uri == "http://127.0.0.1:5000"),
    ],
)
def test_override_reaches_its_field(override: str, look) -> None:
    assert look(compose("cpu-async", [override]))


def test_later_override_wins() -> None:
    assert compose("cpu-async", ["training.steps=7", "training.steps=8"]).training.steps == 8


def test_value_beats_group_whatever_their_order() -> None:
    config = compose("cpu-async", ["training.steps=3", "training=paper"])
    assert (config.training.steps, config.training.weight_decay) == (3, 0.05)


@pytest.mark.parametrize(
    ("override", "start", "hint"),
    [
        ("training.stepz=3", "training.stepz: no such field", "did you mean training.steps?"),
        ("trainin.steps=3", "trainin: no such field", "did you mean training?"),
        ("training.steps=many", "training.steps: must be a whole number", "'many'"),
        ("training.steps=0", "training.steps: must be at least 1", "got 0"),
        ("training.steps=1,2", "training.steps: must be one value", "1,2"),
        ("training.steps.more=1", "", "training.steps"),
        ("rollout.batch_size=100", "rollout.batch_size: must be a multiple of algorithm.group_size", "100"),
        ("training.ranks=129", "training.ranks: must be at most 128, the completions in a minibatch, got 129", ""),
        ("mode=both", "mode: must be one of async, sync", "'both'"),
        ("algorithm=standar", "algorithm: must be one of a3po, cispo, dapo, decoupled, ", "did you mean standard?"),
        ("generation.transfer=files", "generation.transfer: no such field", "known fields: "),
        ("model=folder", "model.path: must be given", "model.path=VALUE"),
        ("storage=s3", "storage.url: must be given", ""),
        ("task=rows", "task.path: must be given", ""),
        ("launch=3", "launch: expected a group of fields", "3"),
        ("training=[1]", "training: must be one of cpu, deepspeed, paper", "[1]"),
        ("~training.steps", "overrides: '~training.steps' must be of the form", ""),
        ("+training.extra=1", "overrides: '+training.extra=1' must be of the form", ""),
        ("training.steps", "overrides: 'training.steps' is not of the form", ""),
        ("training.steps=[1", "overrides: 'training.steps=[1' is not of the form", ""),
        ("name=${nowhere}", "overrides:", "nowhere"),
        ("", "overrides: '' is not of the form", ""),
        ("experiment=cpu-sync", "experiment: is chosen by its own parameter", ""),
    ],
)
def test_wrong_override_is_one_line_that_names_the_field(override: str, start: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("cpu-async", [override])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(start)
    assert hint in message


def test_unknown_experiment_lists_the_known_ones() -> None:
    message = r"^experiment: must be one of cpu-async, [^']*cpu-sync, [^']*got 'cpu-asinc'; did you"
    with pytest.raises(ConfigError, match=message):
        compose("cpu-asinc")
