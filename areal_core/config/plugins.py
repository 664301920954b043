"""Components that a configuration names: registered ones, or other packages' by import path.

Python looks up an import path, `package.module:name`, in installed packages, PYTHONPATH, and the directory in which the
run was started. Commands pass the last two to the worker that runs them (`flows.watch`).
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
    """Raise ConfigError for a name that is neither registered nor an import path. Imports nothing."""
    if name not in registered and not _IMPORT_PATH.fullmatch(name):
        raise ConfigError(
            f"{field}: must be one of {', '.join(registered)}, or an import path, package.module:name, got {name!r}"
        )


def find(field: str, name: str, registered: Mapping[str, T]) -> T:
    """The component of a name. Raises the errors of `check_name`, and ConfigError for a failed import."""
    check_name(field, name, registered)
    if name in registered:
        return registered[name]
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the import runs the package's code
        where = f"{os.uname().nodename} looked in {os.getcwd()} and PYTHONPATH={os.environ.get('PYTHONPATH', '')!r}"
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}: {name} can't be imported: {said}; {where}") from error
