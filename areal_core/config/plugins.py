"""Parts that a configuration names: registered ones, and those of other packages by import path.

An import path, `package.module:name`, is looked up where Python looks for modules: installed packages, PYTHONPATH, and
the directory that the run was started in. Commands hand both to the worker that runs them (`flows.watch`).
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from areal_core.errors import ConfigError

T = TypeVar("T")

_IMPORT_PATH = re.compile(r"\w+(\.\w+)*:\w+")


def check_name(field: str, name: str, registered: Collection[str]) -> None:
    """Raises ConfigError for a name that is neither registered nor an import path. Imports nothing."""
    if name not in registered and not _IMPORT_PATH.fullmatch(name):
        raise ConfigError(
            f"{field}: must be one of {', '.join(registered)}, or an import path, package.module:name, got {name!r}"
        )


def find(field: str, name: str, registered: Mapping[str, T]) -> T:
    """The part of a name. Raises ConfigError as `check_name` does, and for an import path that can't be imported."""
    check_name(field, name, registered)
    if name in registered:
        return registered[name]
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # its code runs as it is imported
        where = f"{os.uname().nodename} looked in {os.getcwd()} and PYTHONPATH={os.environ.get('PYTHONPATH', '')!r}"
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}: {name} can't be imported: {said}; {where}") from error
