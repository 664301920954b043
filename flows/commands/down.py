"""`areal down`: stop the servers that `areal up` started."""

from __future__ import annotations

from collections.abc import Sequence

from areal_core.errors import ConfigError
from flows import cli, stack


def main(arguments: Sequence[str]) -> None:
    cli.parser("down", "").parse_args(arguments)
    there = stack.running()
    if there is None:
        print("No servers are running.")
    elif there.owner != "up":
        raise ConfigError(
            f"`areal {there.owner}` (pid {there.pid}) runs its own servers; stop that command to stop them"
        )
    else:
        stack.stop(there)
        print("Stopped.")
