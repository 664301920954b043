"""`areal compare`: run the deployment `areal-compare/compare` and print its result (flows.watch)."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from areal_core.errors import ConfigError
from flows import cli, watch
from flows.comparison.design import DEFAULT_ARMS, Comparison, generated_name, read_comparison
from flows.compose import split_experiment, swept


def main(arguments: Sequence[str]) -> int:
    parser = cli.parser(
        "compare",
        "",
        "experiment=long-tail seed=1,2,3,4,5,6",
        "--arm 'sync: mode=sync' --arm 'async-8: rollout.max_staleness=8' training.steps=50",
    )
    parser.add_argument(
        "--arm",
        action="append",
        metavar="'NAME: field=value ...'",
        help=f"name and overrides of an arm; repeat for each arm, reference first; default: {', '.join(DEFAULT_ARMS)}",
    )
    parser.add_argument("--name", help="name of the comparison; the name of an existing one resumes it")
    cli.add_settings(parser, " of all arms; seed=1,2,3 sets the seeds")

    def chosen() -> dict[str, Any]:
        options = parser.parse_intermixed_args(arguments)
        values = parameters(options.settings, options.arm, options.name)
        print(f"Comparison {values['name']}", flush=True)
        return values

    return watch.run_command("compare", "areal-compare/compare", chosen)


def parameters(settings: Sequence[str], arm: Sequence[str] | None = None, name: str | None = None) -> dict[str, Any]:
    """Parameters of the flow.
    Missing settings come from the comparison `name` if it exists, else from the defaults. Raises ConfigError."""
    experiment, overrides = split_experiment(settings, "")
    overrides, varied, seeds = swept(overrides)
    if varied:
        raise ConfigError(
            f"{next(iter(varied))}: must be one value; to compare values, define arms with --arm 'NAME: field=value'"
        )
    first = experiment or "cpu-async"
    name = name or generated_name(first, secrets.token_hex(6))
    start = Comparison(name=name, experiment=first, arms=DEFAULT_ARMS, seeds=[1, 2, 3], overrides=overrides)
    known = read_comparison(start.folder())
    given = {"experiment": experiment, "arms": _arms(arm or ()), "seeds": seeds, "overrides": overrides}
    chosen = replace(known or start, matched=True, **{field: value for field, value in given.items() if value})
    (chosen.continuing(known) if known else chosen).trials()  # raises ConfigError for any invalid setting
    return chosen.parameters()


def _arms(given: Sequence[str]) -> dict[str, list[str]]:
    arms: dict[str, list[str]] = {}
    for text in given:
        name, colon, overrides = text.partition(":")
        if not colon:
            raise ConfigError(f"--arm: must be of the form 'NAME: field=value ...', got {text!r}")
        if (name := name.strip()) in arms:
            raise ConfigError(f"--arm: names must be distinct, got {name} twice")
        try:
            arms[name] = shlex.split(overrides)
        except ValueError as error:
            raise ConfigError(f"--arm: can't parse {text!r}: {error}") from error
    return arms
