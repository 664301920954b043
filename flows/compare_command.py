"""`make compare`: one flow run of `areal-compare/compare`, watched to its end, and its result; see flows.watch."""

from __future__ import annotations

import argparse
import dataclasses
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from areal_core.errors import ConfigError
from flows import watch
from flows.comparison.design import DEFAULT_ARMS, Comparison, generated_name, read_comparison

_EPILOG = """
An arm is a name, a colon and what makes it, as in --arm 'async-2: mode=async rollout.max_staleness=2' or
--arm 'sync: experiment=cpu-sync'. The first one is the reference. Without any: sync, async-1, async-2 and async-4.
"""


def main() -> int:
    arguments = _arguments()

    def chosen() -> dict[str, Any]:
        values = parameters(**vars(arguments))
        print(f"Comparison {values['name']}", flush=True)
        return values

    return watch.run_command("compare", "areal-compare/compare", chosen)


def parameters(
    *,
    overrides: Sequence[str],
    experiment: str | None = None,
    arm: Sequence[str] | None = None,
    seeds: str | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """The flow's parameters. What isn't given is that of the comparison `name`, if there is one, or the default.

    Raises ConfigError.
    """
    first = experiment or "cpu-async"
    name = name or generated_name(first, secrets.token_hex(6))
    start = Comparison(name=name, experiment=first, arms=DEFAULT_ARMS, seeds=[1, 2, 3], overrides=overrides)
    known = read_comparison(start.folder())
    start = known or start
    chosen = Comparison(
        name=name,
        experiment=experiment or start.experiment,
        arms=_arms(arm) if arm else start.arms,
        seeds=start.seeds if seeds is None else _seeds(seeds),
        overrides=overrides or start.overrides,
    )
    (chosen.continuing(known) if known else chosen).trials()  # all that is wrong with it
    return dataclasses.asdict(chosen)


def _arms(given: Sequence[str]) -> dict[str, list[str]]:
    arms: dict[str, list[str]] = {}
    for text in given:
        name, colon, overrides = text.partition(":")
        if not colon:
            raise ConfigError(f"arm: must be of the form 'name: field=value ...', got {text!r}")
        if (name := name.strip()) in arms:
            raise ConfigError(f"arm: {name} is there twice")
        try:
            arms[name] = shlex.split(overrides)
        except ValueError as error:
            raise ConfigError(f"arm: {text!r}: {error}") from error
    return arms


def _seeds(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip(" ,"))
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ConfigError(f"seeds: must be whole numbers, as in 1,2,3, got {wrong[0]!r}")
    return [int(word) for word in words]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make compare", description=__doc__, epilog=_EPILOG, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--experiment")
    parser.add_argument("--arm", action="append", metavar="'NAME: field=value ...'", help="once for every arm")
    parser.add_argument("--seeds", help="as in 1,2,3")
    parser.add_argument("--name", help="of the comparison; one that exists is continued")
    parser.add_argument("overrides", nargs="*", default=[], metavar="field=value", help="of all arms")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
