"""Compose an experiment's name and overrides into a checked `RunConfig`.

This is the only module that uses Hydra. The schema in `areal_core.config.schema` holds every default. Hydra's
ConfigStore gets it as plain values, not as dataclasses. So only `areal_core.config.schema.load` checks types, bounds
and names, with one line per error.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_core.config.fields import leaves
from areal_core.config.files import read_values
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.run.folders import with_final_model
from flows.places import FILES

CONF = FILES / "conf"

ConfigStore.instance().store(name="schema", node=dataclasses.asdict(RunConfig()))


def _required(_: str, *, _node_: Any) -> NoReturn:
    """Resolver of `${required:model.path}` in files of `conf/`: a value that the user must give.

    OmegaConf's `???` does not work here, because the schema's default would replace it."""
    name = _node_._get_full_key(None)  # in a mixture: tasks.NAME.task.path
    raise ConfigError(f"{name}: must be given; set {name}=VALUE")


OmegaConf.register_new_resolver("required", _required, replace=True)


def experiments() -> list[str]:
    """Names of the experiments in `conf/`. Files that begin with an underscore belong to other commands."""
    return [name for name in _options("experiment") if not name.startswith("_")]


def configure(
    experiment: str = "cpu-async",
    mode: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    stop_at_score: float | None = None,
    stop_after_minutes: float | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Configuration from the flow's parameters.
    Named parameters win over `overrides`. Raises ConfigError."""
    named = {
        "mode": mode,
        "seed": seed,
        "training.steps": steps,
        "stop.score": stop_at_score,
        "stop.minutes": stop_after_minutes,
    }
    return compose(experiment, [*overrides, *(f"{k}={v}" for k, v in named.items() if v is not None)])


def compose(experiment: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Configuration of `experiment` with overrides in Hydra's grammar: `training.steps=5`, `task=rows`.

    Raises ConfigError, one line that starts with the field, for any error in them."""
    if experiment not in _options("experiment"):
        raise _unknown("experiment", experiment, experiments())
    try:
        composed = _composed(f"experiment={experiment}", *map(_checked, overrides))
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _config_error(error) from error
    return load(cast(Mapping[str, Any], values))


def split_experiment(settings: Sequence[str], default: str = "cpu-async") -> tuple[str, list[str]]:
    """Split the settings of a command line into the experiment and the overrides.

    The settings of a user's experiment file, `experiment=own.yaml`, precede the other overrides. The file may name the
    experiment that it builds on, as `experiment: smollm2`. Raises ConfigError."""
    experiment, own, others = default, [], []
    for setting in settings:
        field, _, value = setting.partition("=")
        if field.strip() != "experiment":
            others.append(setting)
        elif value.endswith((".yaml", ".yml")):
            base, own = _read_experiment(Path(value))
            experiment = base or default or "cpu-async"
        else:
            experiment, own = value, []
    return experiment, [*own, *others]


def swept(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]], list[int]]:
    """Split overrides into those with one value, the values of each swept field, and the seeds of `seed=1,2,3`.
    Raises ConfigError."""
    common, varied, seeds = [], {}, []
    for override in overrides:
        parsed = _parsed(override)
        sweeps = parsed.is_sweep_override()
        if parsed.key_or_group == "seed":
            words = parsed.sweep_string_iterator() if sweeps else [parsed.get_value_string()]
            seeds = [_seed(str(word)) for word in words]
        elif sweeps:
            varied[parsed.key_or_group] = [str(value) for value in parsed.sweep_string_iterator()]
        else:
            common.append(override)
    return common, varied, seeds


def _seed(word: str) -> int:
    if not word.isdecimal():
        raise ConfigError(f"seed: must be whole numbers, as in seed=1,2,3, got {word!r}")
    return int(word)


def _read_experiment(file: Path) -> tuple[str | None, list[str]]:
    """The base and the overrides of a user's experiment file, which has the form of the files in conf/experiment.
    Raises ConfigError."""
    values = read_values("experiment", file)
    base = values.pop("experiment", None)
    if base is not None and base not in experiments():
        raise ConfigError(f"experiment: {file}: must build on one of {', '.join(experiments())}, got {base!r}")
    settings: list[str] = []
    for group in values.pop("defaults", []):
        if group == "_self_":
            continue
        [(name, option)] = group.items() if isinstance(group, dict) else [("", group)]
        if not str(name).startswith("override /"):
            raise ConfigError(
                f"experiment: {file}: defaults must be of the form 'override /GROUP: OPTION', got {group!r}"
            )
        settings.append(f"{str(name).removeprefix('override /')}={option}")
    return base, [*settings, *(f"{name}={_value(value)}" for name, value in leaves(values))]


def _value(value: Any) -> str:
    """`value` in Hydra's grammar."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_value(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def quoted(value: str) -> str:
    """`value` quoted, so that Hydra's grammar takes it literally."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@lru_cache(maxsize=256)
def _composed(*arguments: str) -> DictConfig:
    """Compose with Hydra.
    Cached and unresolved: a comparison composes the same often, and Hydra takes 0.1 s."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(arguments))


def _checked(override: str) -> str:
    """`override` in a form that Hydra accepts, forced in: `load` checks field names with better messages."""
    parsed = _parsed(override)
    name = parsed.key_or_group
    if parsed.is_sweep_override():
        raise ConfigError(f"{name}: must be one value, got {parsed.get_value_string()!r}")
    if parsed.type is OverrideType.ADD and name.startswith("tasks."):
        override = override.removeprefix("+")
    elif parsed.type is not OverrideType.CHANGE:
        raise ConfigError(
            f"overrides: must be of the form field=value, got {override!r}; fields can't be added or removed"
        )
    if name == "experiment":
        raise ConfigError("experiment: must not be in overrides; set the parameter experiment")
    if not (CONF / name).is_dir():
        return f"++{override}"
    if (option := parsed.get_value_string()) not in _options(name):
        raise _unknown(name, option, _options(name))
    return override


def _parsed(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(f"overrides: must be of the form field=value, got {override!r}") from error


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _unknown(group: str, option: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(option, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"{group}: must be one of {', '.join(known)}, got {option!r}{hint}")


def _config_error(error: BaseException) -> ConfigError:
    """Our own error, if it is the root cause (OmegaConf wraps it twice); else Hydra's error, first line."""
    root = error
    while root.__context__ is not None:
        root = root.__context__
    return root if isinstance(root, ConfigError) else ConfigError(f"overrides: {str(error).strip().splitlines()[0]}")


# ---- the benchmarks of an evaluation ----


EVALUATION = "_evaluation"  # file of conf/experiment for evaluations only


def benchmark_configs(
    model: str,
    benchmarks: Sequence[str],
    *,
    samples: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, RunConfig]:
    """One configuration per benchmark, by name. Raises ConfigError.

    A benchmark is a file of conf/task, with its held-out prompts, or name=path for prompts in a file. `model` is a
    folder, a GGUF file or the name of a run."""
    given = {"evaluation.samples": samples, "seed": seed}
    common = [*overrides, *(f"{field}={value}" for field, value in given.items() if value is not None)]
    configs: dict[str, RunConfig] = {}
    for words in benchmarks:
        name, _, path = words.partition("=")
        if name in configs:
            raise ConfigError(f"benchmarks: names must be distinct, got {name} twice")
        file = [f"task.held_out_path={quoted(path)}"] if path else []
        configs[name] = compose(EVALUATION, [f"task={name}", *file, f"model.path={quoted(model)}", *common])
    if not configs:
        raise ConfigError("benchmarks: must name at least one, such as gsm8k or gsm8k=test.jsonl, got none")
    return {name: with_final_model(config) for name, config in configs.items()}
