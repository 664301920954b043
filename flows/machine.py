"""What the programs of a cloud's machines have in common: the file that says what the machine was told when it booted,
and secrets in the cloud's parameter store (AWS's SSM). The only user of boto3."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import boto3
import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from areal_core.errors import ConfigError, StorageError

T = TypeVar("T")

_AT_ONCE = 10  # parameters that one request may name


def told(kind: type[T]) -> T:
    """What the machine was told, from the file that the command line names. Raises ConfigError."""
    if len(sys.argv) != 2:
        raise ConfigError(f"{Path(sys.argv[0]).name}: must be given the file that says what the machine was told")
    try:
        return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{sys.argv[1]}: {error}") from None


def secret_values(region: str, names: Mapping[str, str]) -> dict[str, str]:
    """The values of the parameters that `names` names, by its keys. Raises ConfigError for those that there are not,
    and StorageError where the store doesn't say."""
    asked = sorted(set(names.values()))
    values: dict[str, str] = {}
    try:
        store = boto3.client("ssm", region_name=region)
        for first in range(0, len(asked), _AT_ONCE):
            found = store.get_parameters(Names=asked[first : first + _AT_ONCE], WithDecryption=True)
            values |= {parameter["Name"]: parameter["Value"] for parameter in found["Parameters"]}
    except (BotoCoreError, ClientError) as error:
        raise StorageError(f"secrets: {error}") from None
    if absent := [name for name in asked if name not in values]:
        raise ConfigError(f"secrets: there is no parameter {', '.join(absent)} in {region}")
    return {key: values[name] for key, name in names.items()}
