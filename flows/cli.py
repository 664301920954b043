"""`areal`: the command for all uses of this system. Each subcommand is a module of flows.commands.

The `main` of a subcommand returns an exit status, or None for 0, and raises ArealError. Subcommands take settings as
`field=value` in Hydra's grammar: `experiment=cpu-tools training.steps=50`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from areal_core.run.command import Parser, run_command

COMMANDS = {  # one-line descriptions, for --help
    "setup": "install an optional part: vLLM, a pretrained model, reasoning tasks, the sandbox",
    "train": "train one run, or a sweep of runs, and print the result",
    "compare": "compare synchronous with asynchronous training over several seeds",
    "evaluate": "score a model on benchmarks",
    "try": "sample the base model before training, and tell whether a run can learn from it",
    "plan": "estimate the GPU memory of an experiment, without a GPU",
    "advise": "suggest a better split of devices from the rates of a finished run",
    "doctor": "check the requirements on this machine, or describe a model and its prompts",
    "up": "start Prefect, MLflow and a worker, and leave them running",
    "down": "stop the servers that `areal up` started",
    "prune": "show the disk space of old runs, and free it",
    "nodes": "plan, create, list and destroy the AWS nodes of a run by hand",
    "reap": "destroy AWS nodes whose run has no owner",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; 2 for an unknown subcommand."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(f"areal {metadata.version('areal-flows')}")
    elif name in COMMANDS:
        module = import_module(f"flows.commands.{'try_' if name == 'try' else name}")
        return run_command(lambda: module.main(rest))
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        print(f"areal: error: unknown command {name!r}{hint} `areal --help` lists all commands", file=sys.stderr)
        return 2
    return 0


def parser(name: str, *examples: str) -> Parser:
    """Argument parser of a subcommand. Its help ends with these examples."""
    shown = "\n".join(f"  areal {name} {example}".rstrip() for example in examples)
    return Parser(
        prog=f"areal {name}",
        description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
        epilog=f"examples:\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_settings(options: Parser, what: str = "") -> None:
    """Add the positional arguments `field=value`. `what` ends their help text."""
    options.add_argument("settings", nargs="*", default=[], metavar="field=value", help=f"settings{what}")


def _help() -> str:
    commands = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    return f"""\
usage: areal COMMAND [field=value ...]

Asynchronous reinforcement learning of language models.

{commands}

`areal COMMAND --help` shows the options of a command, and examples.

examples:
  areal train
  areal train experiment=cpu-tools mode=sync training.steps=50"""


if __name__ == "__main__":
    sys.exit(main())
