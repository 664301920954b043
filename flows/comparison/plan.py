"""What is compared with what: arms, seeds, and the checks that make two arms comparable.

Arms are lists of overrides over one experiment; the first arm is the reference. All arms of a seed see the same
prompts and train on the same number of trajectories on the same devices. Trials of a seed are neighbours in time, and
who goes first changes from seed to seed, so that neither a machine that grows slower nor a cold start favours an arm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_core.config import RunConfig
from areal_core.errors import ConfigError
from flows.compose import compose

DEFAULT_ARMS: dict[str, list[str]] = {
    "sync": ["mode=sync"],
    "async-1": ["mode=async", "rollout.max_staleness=1"],
    "async-2": ["mode=async", "rollout.max_staleness=2"],
    "async-4": ["mode=async", "rollout.max_staleness=4"],
}

_NAME = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
# Arms may differ in how they generate and train, not in what is learnt, on what, from where and how it is judged.
_MATCHED = (
    *("model", "task", "warmup", "evaluation", "stop", "emulation"),
    *("seed", "state_dir", "launch.devices", "algorithm.group_size"),
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the experiment."""

    name: str
    overrides: tuple[str, ...]  # in Hydra's grammar


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison."""

    arm: str
    seed: int
    run_id: str
    config: RunConfig


def plan(
    comparison: str,
    experiment: str,
    arms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
) -> list[Trial]:
    """All trials of a comparison, in the order in which to run them; `overrides` hold for every arm.

    Raises ConfigError in one line: for names, seeds and overrides that can't be, and for arms that don't match.
    """
    _check_names(comparison, arms)
    _check_seeds(seeds)
    compose(experiment)  # a wrong name of an experiment is no arm's fault
    trials: list[Trial] = []
    for position, seed in enumerate(seeds):
        configs = {arm: _compose(arm, experiment, [*overrides, *own], seed) for arm, own in arms.items()}
        check_matched(configs)
        for arm in _rotated(list(arms), position):
            trials.append(Trial(arm=arm, seed=seed, run_id=f"{comparison}-{arm}-s{seed}", config=configs[arm]))
    return trials


def check_matched(configs: Mapping[str, RunConfig]) -> None:
    """Raise ConfigError, naming arm and field, unless the configurations of one seed, by arm, can be compared.

    They match in `_MATCHED`, in the trajectories that they train on, in whether their accelerators are emulated, and
    use no more than launch.devices devices at a time. The first is the one that the others are held against.
    """
    reference, *others = configs
    for arm in others:
        for field in _MATCHED:
            ours, theirs = (dict(_leaves(configs[name], field)) for name in (arm, reference))
            for name, value in ours.items():
                if value != theirs[name]:
                    raise _differs(arm, name, value, reference, theirs[name])
        _check_trajectories(arm, configs[arm], reference, configs[reference])
        if configs[arm].emulated != configs[reference].emulated:
            names = (configs[arm].generation.engine, configs[reference].generation.engine)
            raise _differs(arm, "generation.engine", names[0], reference, names[1])
    for arm, config in configs.items():
        _check_devices(arm, config)


def _check_names(comparison: str, arms: Mapping[str, Sequence[str]]) -> None:
    for field, name in [("comparison", comparison), *(("arms", arm) for arm in arms)]:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{field}: a name must be letters, digits and single dashes, got {name!r}")
    if len(arms) < 2:
        raise ConfigError(f"arms: must be at least 2, got {len(arms)}")


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise ConfigError("seeds: must be at least one")
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds: must be distinct, got {', '.join(map(str, seeds))}")


def _compose(arm: str, experiment: str, overrides: list[str], seed: int) -> RunConfig:
    if any(override.partition("=")[0].strip() == "seed" for override in overrides):
        raise ConfigError(f"arms.{arm}: seed is chosen by seeds, not by an override")
    try:
        return compose(experiment, [*overrides, f"seed={seed}"])
    except ConfigError as error:
        raise ConfigError(f"arms.{arm}: {error}") from error


def _rotated(arms: list[str], by: int) -> list[str]:
    first = by % len(arms)
    return arms[first:] + arms[:first]


def _check_trajectories(arm: str, config: RunConfig, reference: str, other: RunConfig) -> None:
    ours, theirs = ((c.rollout.batch_size, c.training.steps) for c in (config, other))
    if ours[0] * ours[1] == theirs[0] * theirs[1]:
        return
    if ours[0] == theirs[0]:
        raise _differs(arm, "training.steps", ours[1], reference, theirs[1])
    shown = [f"{batch} * {steps}" for batch, steps in (ours, theirs)]
    raise _differs(arm, "rollout.batch_size * training.steps", shown[0], reference, shown[1])


def _check_devices(arm: str, config: RunConfig) -> None:
    """No phase of a run may use more devices than it is charged for.

    Asynchronous servers and ranks that outnumber the cores share them, since a run is confined to launch.devices cores;
    nothing confines emulated devices, of which every process has one to itself.
    """
    servers, ranks, devices = config.generation_servers, config.training_ranks, config.launch.devices
    uses = {"generation.servers": servers, "training.ranks": ranks}
    if config.emulated and config.mode == "async":
        uses = {"generation.servers + training.ranks": servers + ranks}
    for name, used in uses.items():
        if used > devices:
            raise ConfigError(f"arms.{arm}: {name} must be at most launch.devices ({devices}), got {used}")


def _leaves(config: RunConfig, field: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of the field `field`, or of all fields below it."""
    value: Any = config.to_dict()
    for part in field.split("."):
        value = value[part]
    if isinstance(value, dict):
        yield from ((f"{field}.{name}", below) for name, below in value.items())
    else:
        yield field, value


def _differs(arm: str, field: str, value: object, reference: str, other: object) -> ConfigError:
    return ConfigError(f"arms.{arm}: {field} must be the same in every arm, got {value}, {reference} has {other}")
