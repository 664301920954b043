"""`make plan`: what an experiment would need of GPUs, of any kind, without one of them and without a model's weights.

python -m flows.plan paper-7b-math --model 7b launch.device_memory_gib=80
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from areal_core.errors import ConfigError
from areal_core.models.spec import read_spec
from areal_core.planning.footprint import check_footprint, footprint
from areal_core.planning.time_model import SPECS
from areal_core.run.command import Parser, run_command
from areal_core.run.preflight import device_memory
from flows.compose import compose

_REQUIRED = ("model.path", "task.path", "task.held_out_path")  # what a plan has no use for


_PAPER = {"1.5b-math": "1.5b", "7b-math": "7b", "14b-code": "14b", "32b-code": "32b"}
PLANNED = {  # experiment -> the largest model that it is meant for
    "gpu-shared": "1.5b",
    "paper-small": "1.5b",
    **{f"paper-{name}{mode}": model for name, model in _PAPER.items() for mode in ("", "-sync")},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m flows.plan", description="What an experiment needs of GPUs.")
    parser.add_argument("experiment", choices=sorted(PLANNED))
    parser.add_argument("--model", help=f"a folder with a config.json, or {', '.join(SPECS)}; default: as planned")
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE")
    options = parser.parse_intermixed_args(arguments)
    config = compose(options.experiment, [*(f"{name}=unused" for name in _REQUIRED), *options.overrides])
    if config.launch.accelerator != "cuda":
        raise ConfigError(f"launch.accelerator: must be cuda for a plan of GPUs, got {config.launch.accelerator!r}")
    model = options.model or PLANNED[options.experiment]
    spec, memory = SPECS.get(model) or read_spec(model), device_memory(config)
    print(footprint(config, spec, memory).table())
    check_footprint(config, spec, memory)


if __name__ == "__main__":
    sys.exit(run_command(main))
