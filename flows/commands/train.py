"""`areal train`: run the deployment `areal/train`, for a sweep `areal-compare/compare` (flows.watch)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import yaml

from flows import cli, watch
from flows.commands import advise
from flows.comparison.design import Comparison, generated_name, sweep_arms
from flows.compose import compose, split_experiment, swept


def main(arguments: Sequence[str]) -> int:
    parser = cli.parser(
        "train",
        "",
        "experiment=cpu-tools mode=sync training.steps=50",
        "experiment=own.yaml stop.score=0.9",
        "-m seed=1,2 algorithm=grpo,gspo",
        "experiment=smollm2 --cfg job",
    )
    parser.add_argument(
        "--split", metavar="RUN", help="name of a finished run, whose rates choose the split of devices"
    )
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration; start nothing")
    parser.add_argument("-m", "--multirun", action="store_true", help="train every combination of a,b,c values")
    parser.add_argument("--name", help="name of the sweep; the name of an existing one resumes it")
    cli.add_settings(parser, "; experiment= is the name of a file of conf/experiment, or a path")

    options = parser.parse_intermixed_args(arguments)
    experiment, overrides = split_experiment(options.settings)
    if options.cfg:
        print(yaml.safe_dump(compose(experiment, overrides).to_dict(), sort_keys=False), end="")
        return 0

    def chosen() -> dict[str, Any]:
        its = overrides
        if options.split is not None:
            split = advise.splits(options.split, compose(experiment, overrides))[0]
            print(f"Split of devices from run {options.split}: {split.servers} servers, {split.ranks} ranks.")
            its = [*overrides, *split.overrides]
        if options.multirun:
            return _sweep(experiment, its, options.name)
        compose(experiment, its)
        return {"experiment": experiment, "overrides": its}

    if options.multirun:
        return watch.run_command("compare", "areal-compare/compare", chosen)
    return watch.run_command("train", "areal/train", chosen)


def _sweep(experiment: str, overrides: Sequence[str], name: str | None) -> dict[str, Any]:
    common, varied, seeds = swept(overrides)
    asked = Comparison(
        name=name or generated_name(experiment, secrets.token_hex(6)),
        experiment=experiment,
        arms=sweep_arms(varied),
        seeds=seeds or [compose(experiment, common).seed],
        overrides=common,
        matched=False,
    )
    print(f"Sweep {asked.name}: {len(asked.trials())} runs", flush=True)
    return asked.parameters()
