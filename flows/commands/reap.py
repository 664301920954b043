"""`areal reap`: run the reaper of the flow `areal-reap` once, without a Prefect server.

Exit status 0: done, or nothing to do. Exit status 1: a deletion failed. Exit status 2: a setting or the store is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_core.errors import ProvisionError
from flows import cli
from flows.places import STATE
from flows.provision.reaper import reaper_of


def main(arguments: Sequence[str], state: Path = STATE) -> None:
    """Destroy nodes whose lease is over.
    Raises ConfigError, and ProvisionError if some could not be destroyed."""
    parser = cli.parser("reap", "", "--store s3://bucket")
    parser.add_argument(
        "--store", metavar="s3://bucket", help="store with the leases; needed if `make control` ran on another machine"
    )
    reaper = reaper_of(state, parser.parse_args(arguments).store, print)
    if reaper is None:
        print("Nothing to destroy: no store of leases is known. Run `make control` here, or give --store.")
        return
    reaped = reaper.reap()  # logs each run
    if failed := sum(one.failed is not None for one in reaped):
        raise ProvisionError(f"the nodes of {failed} of {len(reaped)} runs could not be destroyed; repeat the command")
    if not reaped:
        print("Nothing to destroy.")
