"""`make reap`: what the flow `areal-reap` does, once, without a Prefect server.

    python -m flows.reap_command [--store s3://bucket]

Exit status: 0 done, or nothing to do; 1 something could not be ended; 2 a setting, or the store, is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_core.errors import ProvisionError
from areal_core.run.command import Parser, run_command
from flows.provision.reaper import reaper_of
from flows.stack import STATE


def reap(state: Path = STATE) -> None:
    parser = Parser(prog="make reap", description="End nodes that nobody has any more.")
    parser.add_argument("--store", metavar="s3://bucket", help="where the leases are, if `make control` was elsewhere")
    reaper = reaper_of(state, parser.parse_args().store, print)
    if reaper is None:
        print("Nothing to reap: no cloud is known here.")
        return
    reaped = reaper.reap()  # which tells of each
    if failed := sum(one.failed is not None for one in reaped):
        raise ProvisionError(f"{failed} of {len(reaped)} runs could not be ended; they are tried again by the next one")
    if not reaped:
        print("Nothing to reap.")


if __name__ == "__main__":
    sys.exit(run_command(reap))
