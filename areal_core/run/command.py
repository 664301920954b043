"""What the commands of this package have in common: options, signals, exit statuses and the line of an error.

Exit status: 0 the run has ended in order; 1 it failed; 2 a setting, a model, the storage or the tracking server is
wrong; 130 or 143 it was stopped by SIGINT or SIGTERM, after everything that it had started was.
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
    """A signal asks this process to end; carries its number."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong options, which is reported like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def run_command(action: Callable[[], None]) -> int:
    """Call `action` in the main thread; returns the exit status after at most one line on stderr. SIGINT and SIGTERM
    raise Stopped inside `action`."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _stop)
    try:
        action()
    except Stopped as stopped:
        print("areal: stopped", file=sys.stderr)
        return 128 + int(stopped.args[0])
    except ArealError as error:
        print(f"areal: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ModelError | StorageError | TrackingError) else 1
    return 0


def _stop(signum: int, _: FrameType | None) -> None:
    """Unwind once; a second signal ends this process at once, and the children see that it is gone."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(signum)
