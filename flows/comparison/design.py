"""Experimental design: trials of arms times seeds in order, and checks that the arms are comparable.

An arm is a list of overrides over the common experiment, or over its own one (`experiment=paper-7b-math-sync`). The
first arm is the reference. All arms of a seed get the same prompts in the same order. They train on the same number of
trajectories, on the same devices. An asynchronous arm may train on other prompts of that order: trajectories still in
flight at its end are not trained on (batch selections admit and drop).

Trials of a seed are neighbours in time, and each seed starts with another arm. So neither a slowing machine nor a cold
start favours an arm.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_core.config.fields import leaves
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.storage.rundir import write_json
from flows.compose import compose

DEFAULT_ARMS: dict[str, list[str]] = {
    "sync": ["mode=sync"],
    "async-1": ["mode=async", "rollout.max_staleness=1"],
    "async-2": ["mode=async", "rollout.max_staleness=2"],
    "async-4": ["mode=async", "rollout.max_staleness=4"],
}

_NAME = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
_MAX_NAME = 60  # characters; names become parts of folder names
# Arms may differ in generation and training, but not in model, prompts, seed, devices or evaluation.
_MATCHED = (
    *("model", "task", "warmup", "evaluation", "stop", "emulation"),
    *("seed", "state_dir", "launch.devices", "algorithm.group_size"),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison."""

    arm: str
    seed: int
    run_id: str  # COMPARISON.ARM.sSEED; names have no dots
    config: RunConfig


def generated_name(experiment: str, unique: str) -> str:
    """Name of an unnamed comparison: the experiment and `unique`, a string of letters and digits."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", experiment)[: _MAX_NAME - len(unique) - 1].strip("-")
    return f"{plain}-{unique}"


def sweep_arms(varied: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Arms of a sweep: every combination of the values of each field."""
    arms: dict[str, list[str]] = {}
    for values in itertools.product(*varied.values()):
        name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(values)).strip("-")[: _MAX_NAME - 4].strip("-") or "run"
        name = name if name not in arms else f"{name}-{len(arms) + 1}"
        arms[name] = [f"{field}={value}" for field, value in zip(varied, values, strict=True)]
    return arms


def check_matched(configs: Mapping[str, RunConfig]) -> None:
    """Raise ConfigError, naming arm and field, unless the configurations of a seed, by arm, match.

    The arms must agree in `_MATCHED`, in the number of trajectories and in emulation, and may use at most
    launch.devices devices at a time. The first arm is the reference. A synchronous reference must use all devices, to
    be a fair baseline."""
    reference, *others = configs
    for arm in others:
        for name, ours, theirs in differences(configs[arm], configs[reference]):
            if any(name == field or name.startswith(f"{field}.") for field in _MATCHED):
                raise _differs(arm, name, ours, reference, theirs)
        _check_trajectories(arm, configs[arm], reference, configs[reference])
        if configs[arm].emulated != configs[reference].emulated:
            names = (configs[arm].generation.engine, configs[reference].generation.engine)
            raise _differs(arm, "generation.engine", names[0], reference, names[1])
    for arm, config in configs.items():
        _check_devices(arm, config, baseline=arm == reference and config.mode == "sync" and not config.emulated)


def differences(ours: RunConfig, theirs: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Dotted name and both values of every field in which two configurations differ."""
    others = dict(leaves(theirs.to_dict()))
    for name, value in leaves(ours.to_dict()):
        if value != others[name]:
            yield name, value, others[name]


def check_name(field: str, name: str) -> None:
    """Raise ConfigError unless the name is valid for a comparison or an arm."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{field}: a name must be letters, digits and single dashes, got {name!r}")
    if len(name) > _MAX_NAME:
        raise ConfigError(f"{field}: a name must have at most {_MAX_NAME} characters, got {len(name)}: {name[:80]}")


def _compose(arm: str, experiment: str, overrides: Sequence[str], own: Sequence[str]) -> RunConfig:
    if any(_field(override) == "seed" for override in (*overrides, *own)):
        raise ConfigError(f"arms.{arm}: must not set seed; set it in seeds")
    chosen = [override.partition("=")[2].strip() for override in own if _field(override) == "experiment"]
    others = [override for override in own if _field(override) != "experiment"]
    with _named(arm):
        return compose(chosen[-1] if chosen else experiment, [*overrides, *others])


@contextmanager
def _named(arm: str) -> Iterator[None]:
    """Context manager that adds the arm's name to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"arms.{arm}: {error}") from error


def _field(override: str) -> str:
    return override.partition("=")[0].strip()


def _check_trajectories(arm: str, config: RunConfig, reference: str, other: RunConfig) -> None:
    ours, theirs = ((c.rollout.batch_size, c.training.steps) for c in (config, other))
    if ours[0] * ours[1] != theirs[0] * theirs[1]:
        shown = [f"{batch} * {steps}" for batch, steps in (ours, theirs)]
        raise _differs(arm, "rollout.batch_size * training.steps", shown[0], reference, shown[1])


def _check_devices(arm: str, config: RunConfig, *, baseline: bool) -> None:
    """Check that no phase uses more than launch.devices devices, and that a `baseline` uses all in both.

    Asynchronous servers and ranks may outnumber the cores and then share them, as a run is confined to launch.devices
    cores. Nothing confines emulated devices; `areal_core.config.schema` has a rule for them."""
    devices = config.launch.devices
    for name, count, each, phase in (
        ("generation.servers", config.generation_servers, config.devices_per_server, "generate"),
        ("training.ranks", config.training_ranks, 1, "train"),
    ):
        most = devices // each
        limit = f"{most} (launch.devices={devices}{f' / {each} devices per server' if each > 1 else ''})"
        why = f", because a synchronous reference arm must {phase} on every device" if baseline else ""
        if count > most or (baseline and count != most):
            raise ConfigError(f"arms.{arm}: {name} must be {'' if baseline else 'at most '}{limit}{why}, got {count}")


def _differs(arm: str, field: str, value: object, reference: str, other: object) -> ConfigError:
    return ConfigError(
        f"arms.{arm}: {field} must be {other} as in {reference}, got {value}; arms may differ only in how they "
        "generate and train"
    )


# ---- the comparison as a whole, kept in its folder ----


@dataclass(frozen=True)
class Comparison:
    """A comparison: arms times seeds over one experiment. Its folder stores it for a later continuation.

    <state_dir>/comparisons/<name>/
        plan.json                experiment, arms, seeds, overrides
        tracking.json            the parent run in MLflow, if it is tracked
        report.md                `flows.comparison.report`"""

    name: str
    experiment: str
    arms: Mapping[str, Sequence[str]]  # name -> overrides; the first is the reference
    seeds: Sequence[int]
    overrides: Sequence[str] = ()  # common to all arms
    matched: bool = True  # arms differ only in how they generate and train; False: a sweep

    def parameters(self) -> dict[str, Any]:
        """Parameters of the flow `areal-compare`."""
        return dataclasses.asdict(self)

    def trials(self) -> list[Trial]:
        """All trials, in execution order.

        Raises ConfigError, one line, for wrong names, seeds or overrides, and for arms that don't match."""
        for field, name in [("comparison", self.name), *(("arms", arm) for arm in self.arms)]:
            check_name(field, name)
        if self.matched and len(self.arms) < 2:
            advice = "define another one with --arm 'NAME: field=value'"
            raise ConfigError(f"arms: must name at least 2 arms to compare, got {len(self.arms)}; {advice}")
        if not self.seeds:
            raise ConfigError("seeds: must list at least one seed, as in seed=1,2,3, got none")
        if len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds: must be distinct, got {', '.join(map(str, self.seeds))}")
        compose(self.experiment, self.overrides)  # an error in the common overrides names no arm
        composed = {arm: _compose(arm, self.experiment, self.overrides, own) for arm, own in self.arms.items()}
        trials: list[Trial] = []
        for position, seed in enumerate(self.seeds):
            configs: dict[str, RunConfig] = {}
            for arm, config in composed.items():
                with _named(arm):
                    configs[arm] = load(replace(config, seed=seed).to_dict())
            if self.matched:
                check_matched(configs)
            first = position % len(configs)
            for arm in [*configs, *configs][first : first + len(configs)]:
                trials.append(Trial(arm=arm, seed=seed, run_id=f"{self.name}.{arm}.s{seed}", config=configs[arm]))
        return trials

    def folder(self) -> Path:
        """Folder of the plan and report, below the `state_dir` of the arms. Raises ConfigError."""
        check_name("comparison", self.name)
        return Path(compose(self.experiment, self.overrides).state_dir).absolute() / "comparisons" / self.name

    def continuing(self, known: Comparison) -> Comparison:
        """This comparison merged with `known`, an earlier one of its name, whose arms and seeds come first.

        Raises ConfigError, one line that names the field, if the two can't be one comparison."""
        self._check("experiment", self.experiment, known.experiment)
        self._check("overrides", list(self.overrides), list(known.overrides))
        self._check("matched", self.matched, known.matched)
        arms = dict(known.arms)
        for arm, overrides in self.arms.items():
            self._check(f"arms.{arm}", list(overrides), list(arms.setdefault(arm, overrides)))
        return replace(self, arms=arms, seeds=list(dict.fromkeys((*known.seeds, *self.seeds))))

    def write(self) -> None:
        folder = self.folder()
        folder.mkdir(parents=True, exist_ok=True)
        arms = [{"name": arm, "overrides": overrides} for arm, overrides in self.arms.items()]  # a list keeps the order
        plan = self.parameters() | {"arms": arms}
        del plan["name"]
        write_json(folder / "plan.json", plan)

    def _check(self, field: str, asked: object, known: object) -> None:
        if asked != known:
            raise ConfigError(
                f"{field}: must be {known!r} as in the existing comparison {self.name}, got {asked!r}; "
                "add only arms and seeds, or choose another name"
            )


def read_comparison(folder: Path) -> Comparison | None:
    """The comparison stored in `folder`; None if there is none.
    Raises ConfigError if its plan is damaged."""
    file = folder / "plan.json"
    try:
        known = json.loads(file.read_text())
        arms = {arm["name"]: arm["overrides"] for arm in known["arms"]}
        return Comparison(**known | {"name": folder.name, "arms": arms})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"comparison: {file} is damaged ({error!r}); restore it, or delete it to start {folder.name} again"
        ) from error
