"""Build dataclasses with bounded fields from plain nested values.

Every error is one line that starts with the dotted name of the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np

from areal_core.errors import ConfigError

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_NAME_BYTES = 160  # file systems allow 255; some files add to the name
_LARGEST = 2**31 - 1  # upper bound of whole numbers without their own
LARGEST_SEED = 2**63 - 1
# Matches a task's field in a message: at its beginning, or followed by a value.
_OF_TASK = re.compile(r"^(?=(?:task|environment)[.:])|(?<![\w./-])(?=(?:task|environment)\.[\w.]+=)")
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def bounded(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A number with `low <= value <= high`, or `value > above`. Without `high`, integers have 31 bits."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def choice(default: str, *choices: str) -> Any:
    """A text field whose value is one of `choices`."""
    return field(default=default, metadata={"choices": choices})


def merge(base: Mapping[str, Any], dotted: str, value: Any, above: str = "") -> dict[str, Any]:
    """A copy of `base` with the nested field `dotted` set to `value`.
    `above` is the prefix of the names in `base`, for error messages."""
    key, _, rest = dotted.partition(".")
    merged = dict(base)
    if rest:
        below = merged.get(key, {})
        if not isinstance(below, Mapping):
            raise ConfigError(f"{above}{dotted}: {above}{key} is a value, not a group of fields")
        merged[key] = merge(typing.cast(Mapping[str, Any], below), rest, value, f"{above}{key}.")
    else:
        merged[key] = value
    return merged


@contextmanager
def of_task(name: str) -> Generator[None]:
    """Within the `with`, errors about a task's fields name the mixture's task `name`, unless it is empty."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(_OF_TASK.sub(f"tasks.{name}.", str(error))) from error


def build(schema: type[Any], values: Any, prefix: str = "") -> Any:
    """An instance of the dataclass `schema`, including its nested dataclasses.

    `prefix` is the prefix of the names in `values`. Raises ConfigError for unknown fields, wrong types and values out
    of bounds, and the errors of each dataclass's `check`.
    """
    given = _group(values, prefix)
    hints = typing.get_type_hints(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key in given:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known fields: {', '.join(fields)}"
            raise ConfigError(f"{prefix}{key}: no such field{hint}")
    built: dict[str, Any] = {}
    for key, value in given.items():
        name = prefix + key
        if dataclasses.is_dataclass(hints[key]):
            built[key] = build(typing.cast(type[Any], hints[key]), value, name + ".")
        elif typing.get_origin(hints[key]) is dict:
            built[key] = _tasks(typing.get_args(hints[key])[1], value, name + ".")
        else:
            built[key] = _check(name, _coerce(name, value, hints[key]), fields[key].metadata)
    instance = schema(**built)
    if check := getattr(instance, "check", None):
        check()
    return instance


def _group(values: Any, prefix: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'configuration'}: expected a group of fields, got {values!r}")
    return typing.cast(Mapping[str, Any], values)


def _tasks(schema: type[Any], values: Any, prefix: str) -> dict[str, Any]:
    """The tasks of a mixture, by name."""
    built: dict[str, Any] = {}
    for key, value in _group(values, prefix).items():
        name = f"{prefix}{key}"
        wanted = "a name of letters, digits and underscores that does not start with a digit"
        require(str(key).isidentifier(), name, wanted, key)
        require(value, name, f"a group of fields with a task, such as {name}.task.name=arithmetic", value)
        with of_task(key):
            built[str(key)] = build(schema, value, name + ".")
    return built


def _coerce(name: str, value: Any, hint: Any) -> Any:
    options: Sequence[Any] = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e308 else math.inf
    if wanted is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)  # YAML 1.1 parses 1e-4 as text
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    kinds = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    optional = " or null" if type(None) in options else ""
    raise ConfigError(f"{name}: must be {kinds[wanted]}{optional}, got {value!r}")


def _check(name: str, value: Any, bounds: Mapping[str, Any]) -> Any:
    if value is None:
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: must be finite, got {value}")
    if choices := bounds.get("choices"):
        require(value in choices, name, f"one of {', '.join(choices)}", value)
    low, high, above = bounds.get("low"), bounds.get("high"), bounds.get("above")
    if high is None and isinstance(value, int):
        high = _LARGEST
    require(low is None or value >= low, name, f"at least {low}", value)
    require(above is None or value > above, name, f"greater than {above}", value)
    require(high is None or value <= high, name, f"at most {high}", value)
    return value


def require(holds: object, name: str, wanted: str, got: object) -> None:
    """Raise ConfigError unless `holds`: the field `name` must be `wanted`."""
    if not holds:
        raise ConfigError(f"{name}: must be {wanted}, got {shown(got)}")


def shown(value: object) -> str:
    """A value as it is written in a configuration."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else repr(value)


def check_file_name(field: str, name: str) -> str:
    """Return `name`; raise ConfigError if it can't name folders, files and objects."""
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(f"{field}: must be letters, digits, dots, dashes and underscores, got {name[:100]!r}")
    return check_length(field, name, _NAME_BYTES)


def check_length(field: str, name: str, most: int) -> str:
    """Return `name`; raise ConfigError if it has more than `most` bytes."""
    if (size := len(name.encode(errors="replace"))) > most:
        raise ConfigError(f"{field}: must have at most {most} bytes, got {size}; shorten {name[:20]}...")
    return name


def refuse_credentials(name: str, address: str | None, instead: str) -> None:
    """Raise ConfigError for an address with a user or password, as settings are stored, sent and shown.
    The message does not repeat them; `instead` says where they belong."""
    if address is not None and "@" in urlsplit(address).netloc:
        raise ConfigError(f"{name}: must hold no user or password; {instead}")


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all nested fields; `prefix` is prepended to the names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            yield prefix + name, value
