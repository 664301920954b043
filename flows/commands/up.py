"""`areal up`: start Prefect, MLflow and a worker in the background."""

from __future__ import annotations

from collections.abc import Sequence

from areal_core.errors import ConfigError
from flows import cli, stack


def main(arguments: Sequence[str]) -> None:
    cli.parser("up", "").parse_args(arguments)
    there = stack.running()
    if there is not None and there.owner != "up":
        raise ConfigError(
            f"`areal {there.owner}` (pid {there.pid}) runs its own servers here; wait until it ends, or stop it"
        )
    if there is None:
        there = stack.Launch("up").wait_ready()
    print(f"{there.pages}\n`areal train`, `compare` and `evaluate` use these servers. `areal down` stops them.")
    print(f"For Prefect's own commands: export PREFECT_API_URL={there.environment['PREFECT_API_URL']}")
