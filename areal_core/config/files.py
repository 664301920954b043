"""Configurations from YAML or JSON files, and settings in text form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from areal_core.config.fields import merge
from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError, one_line


def configuration(source: Path | Mapping[str, Any], settings: Sequence[str]) -> RunConfig:
    """Build a configuration from a file or nested values, with settings such as `training.steps=5` applied.
    Raises ConfigError."""
    values = read_values("configuration", source) if isinstance(source, Path) else source
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"{setting or repr(setting)}: must be of the form field=value, such as training.steps=5")
        try:
            value = yaml.safe_load(text)
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{name}: must be a YAML value, got {text!r:.80}: {one_line(error)}") from error
        values = merge(values, name, value)
    return load(values)


def read_values(field: str, file: Path) -> dict[str, Any]:
    """Read nested values from a file. Raises ConfigError, which names `field` and the file."""
    try:
        values: Any = yaml.safe_load(file.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:  # e.g. numbers with too many digits, or invalid UTF-8
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ConfigError(f"{field}: can't read {file}: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{field}: {file} must be a mapping of fields to values")
    return cast(dict[str, Any], values)
