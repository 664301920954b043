"""`areal plan`: estimate the GPU memory of an experiment. It needs no GPU and no model weights."""

from __future__ import annotations

from collections.abc import Sequence

from areal_core.errors import ConfigError
from areal_core.models.spec import read_spec
from areal_core.planning.footprint import check_footprint, footprint
from areal_core.planning.time_model import SPECS
from areal_core.run.preflight import device_memory
from flows import cli
from flows.compose import compose, split_experiment

_REQUIRED = ("model.path", "task.path", "task.held_out_path")  # required fields that a plan does not use


_PAPER = {"1.5b-math": "1.5b", "7b-math": "7b", "14b-code": "14b", "32b-code": "32b"}
PLANNED = {  # experiment -> its largest intended model
    "gpu-shared": "1.5b",
    "paper-small": "1.5b",
    **{f"paper-{name}{mode}": model for name, model in _PAPER.items() for mode in ("", "-sync")},
}


def main(arguments: Sequence[str]) -> None:
    """Print the estimate. Raises ConfigError, also if the experiment does not fit."""
    parser = cli.parser("plan", "experiment=gpu-shared launch.device_memory_gib=80", "experiment=paper-7b-math")
    parser.add_argument("--model", help=f"folder with a config.json, or one of {', '.join(SPECS)}")
    cli.add_settings(parser, f"; experiment= is one of {', '.join(sorted(PLANNED))}")
    options = parser.parse_intermixed_args(arguments)
    experiment, overrides = split_experiment(options.settings, "gpu-shared")
    config = compose(experiment, [*(f"{name}=unused" for name in _REQUIRED), *overrides])
    if config.launch.accelerator != "cuda":
        raise ConfigError(f"launch.accelerator: must be cuda to estimate GPU memory, got {config.launch.accelerator!r}")
    model = options.model or PLANNED.get(experiment, "7b")
    spec, memory = SPECS.get(model) or read_spec(model), device_memory(config)
    print(footprint(config, spec, memory).table())
    check_footprint(config, spec, memory)
