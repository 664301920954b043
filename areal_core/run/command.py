"""Shared parts of this package's commands: options, signals, the error line and exit statuses.

- 0: the run ended in order
- 1: the run failed
- 2: a setting, a model, the storage or the tracking server is wrong
- 130 or 143: SIGINT or SIGTERM stopped the command, after it had stopped every process that it started
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from areal_core.errors import ArealError, ConfigError, ModelError, StorageError, TrackingError


class Stopped(BaseException):
    """A signal asked this process to end; carries the signal number."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError for wrong options, like all other errors of a command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def run_command(action: Callable[[], int | None]) -> int:
    """Call `action` in the main thread and return its exit status (None: 0), after at most one error line on stderr.
    SIGINT and SIGTERM raise Stopped inside `action`."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _stop)
    try:
        return action() or 0
    except Stopped as stopped:
        print("areal: stopped", file=sys.stderr)
        return 128 + int(stopped.args[0])
    except ArealError as error:
        print(f"areal: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ModelError | StorageError | TrackingError) else 1


def _stop(signum: int, _: FrameType | None) -> None:
    """Raise Stopped at the first signal; a second signal kills this process, and its children notice."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(signum)
