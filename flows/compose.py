"""From an experiment's name and overrides to a checked `RunConfig`. The only user of Hydra.

The schema in `areal_core.config.schema` holds every default. It enters Hydra's ConfigStore as plain values rather than
as dataclasses, so that one place, `areal_core.config.schema.load`, judges types, bounds and names, each in one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_core.config.fields import leaves
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"

ConfigStore.instance().store(name="schema", node=dataclasses.asdict(RunConfig()))


def _required(name: str) -> NoReturn:
    """`${required:model.path}` in a file of `conf/`: a value that only the user can know. (`???` would be taken from
    the schema's default.)"""
    raise ConfigError(f"{name}: must be given, as {name}=VALUE")


OmegaConf.register_new_resolver("required", _required, replace=True)


def experiments() -> list[str]:
    """Names of the experiments that `conf/` holds; one that begins with an underscore is for another command."""
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
    """The configuration that the flow's parameters mean; named ones win over `overrides`. Raises ConfigError."""
    named = {
        "mode": mode,
        "seed": seed,
        "training.steps": steps,
        "stop.score": stop_at_score,
        "stop.minutes": stop_after_minutes,
    }
    return compose(experiment, [*overrides, *(f"{k}={v}" for k, v in named.items() if v is not None)])


def compose(experiment: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of `experiment`, with `overrides` in Hydra's grammar: `training.steps=5`, `task=rows`.

    Raises ConfigError, one line that starts with the field, for whatever is wrong with either.
    """
    if experiment not in _options("experiment"):
        raise _unknown("experiment", experiment, experiments())
    try:
        composed = _composed(f"experiment={experiment}", *map(_checked, overrides))
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _config_error(error) from error
    return load(cast(Mapping[str, Any], values))


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as it stands."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def named_fields(overrides: Sequence[str]) -> set[str]:
    """The fields that overrides name, `training.steps`; of a choice, `algorithm=paper`, those that its file sets, of an
    experiment without those of the one that it is built on."""
    named: set[str] = set()
    for override in overrides:
        parsed = OverridesParser.create().parse_override(override)
        group = parsed.key_or_group
        named |= _set_by(group, parsed.get_value_string()) if (CONF / group).is_dir() else {group}
    return named


def _set_by(group: str, option: str) -> set[str]:
    file = CONF / group / f"{option}.yaml"
    package = re.match(r"# @package (\S+)", file.read_text())
    prefix = f"{group}." if package is None else "" if package[1] == "_global_" else f"{package[1]}."
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))
    bases = [entry for entry in values.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    if group == "experiment":
        bases = []
    return {name for name, _ in leaves(values, prefix)}.union(*(_set_by(group, base) for base in bases))


@lru_cache(maxsize=256)
def _composed(*arguments: str) -> DictConfig:
    """Kept, unresolved, as a comparison asks for the same again and again, and Hydra takes a tenth of a second."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(arguments))


def _checked(override: str) -> str:
    """`override` in a form that Hydra takes. Values are forced in: names of fields are for `load` to judge, because it
    knows what was meant."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(f"overrides: {override!r} is not of the form field=value") from error
    name = parsed.key_or_group
    if parsed.is_sweep_override():
        raise ConfigError(f"{name}: must be one value, got {parsed.get_value_string()!r}")
    if parsed.type is not OverrideType.CHANGE:
        raise ConfigError(f"overrides: {override!r} must be of the form field=value; fields can't be added or removed")
    if name == "experiment":
        raise ConfigError("experiment: is chosen by its own parameter, not by an override")
    if not (CONF / name).is_dir():
        return f"++{override}"
    if (option := parsed.get_value_string()) not in _options(name):
        raise _unknown(name, option, _options(name))
    return override


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _unknown(group: str, option: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(option, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"{group}: must be one of {', '.join(known)}, got {option!r}{hint}")


def _config_error(error: BaseException) -> ConfigError:
    """Ours where ours is at the root of it (OmegaConf wraps it twice), else the first line of Hydra's."""
    root = error
    while root.__context__ is not None:
        root = root.__context__
    return root if isinstance(root, ConfigError) else ConfigError(f"overrides: {str(error).strip().splitlines()[0]}")
