"""The flow `areal-reap`: destroy nodes without an owner, on a schedule (flows.provision.reaper)."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from prefect import flow, get_client, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from areal_core.config.groups import ProvisionConfig
from areal_core.errors import ArealError
from flows.page import retry, show_table, tie_to_worker
from flows.provision.reaper import reaper_of
from flows.shares import forget
from flows.stack import STATE

REAPED = "areal-reaped"  # artifact key
NOTHING_KNOWN = "nothing to destroy: no store of leases is known; run `make control` here, or set the parameter store"


@flow(name="areal-reap")
def areal_reap(store: str | None = None) -> State:
    """Destroy nodes whose lease is over, and resources of runs without a lease.

    The next flow run retries failures.

    Args:
        store: Store with the leases, as s3://bucket. Empty: the bucket that `make control` created from this machine.
    """
    tie_to_worker()  # the next flow run completes unfinished work
    log = get_run_logger()

    def forget_run(run: str) -> None:
        with get_client(sync_client=True) as client:
            forget_it = partial(forget, client, run, ProvisionConfig.work_pool)
            retry(f"delete the work queues of run {run}", forget_it, log.warning)

    try:
        reaper = reaper_of(STATE, store, log.info, forget_run)
        if reaper is None:
            return Completed(message=NOTHING_KNOWN)
        reaped = reaper.reap()
    except ArealError as error:
        log.error("%s", error)
        return Failed(message=str(error))
    if not reaped:
        return Completed(message="nothing to destroy")
    rows = [{column.replace("_", " "): value or "" for column, value in asdict(one).items()} for one in reaped]
    show_table("the table of destroyed nodes", rows, key=REAPED, title="Destroyed")
    if failed := [one for one in reaped if one.failed]:
        return Failed(message="; ".join(map(str, failed)))
    return Completed(message=", ".join(one.run for one in reaped))
