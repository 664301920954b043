"""Secrets in the parameter store of the cloud (AWS's SSM): what they are by their names. The only user of boto3."""

from __future__ import annotations

from collections.abc import Mapping

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from areal_core.errors import ConfigError, StorageError

_AT_ONCE = 10  # parameters that one request may name


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
