"""The flow `areal-node`: what one node does of a run, started by the node's own worker.

    check the node -> lead the run, or take a share of it over -> its end

The first node that trains leads: the launcher runs there, with all roles that other nodes don't have. It tells the
others where it is, and the run's token, by a secret block of Prefect's.
A node that is to be reclaimed leaves the run; the flow that has provisioned it gives its share to another one.
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

from prefect import flow, get_client, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from areal_core.errors import ArealError
from flows.bootstrap import troubles
from flows.compose import configure
from flows.follower import follow
from flows.head import lead
from flows.machine import identity, own_address
from flows.notice import Notice
from flows.page import CancelUnheard, tie_to_worker
from flows.provision.request import by_role
from flows.roles import THREADS
from flows.shared import HOPELESS
from flows.shares import BAD_NODE, CHECKED, NODE, RECLAIMED, REFUSED


@flow(name="areal-node", task_runner=THREADS)
def areal_node(
    run_id: str, role: Literal["generation", "trainer"], index: int, known_by: str, run: dict[str, Any]
) -> State:
    """One node's share of a run.

    Args:
        run_id: The run.
        role: What the node does.
        index: Which of its role's nodes it is; the first one that trains leads the run.
        known_by: The flow run that has provisioned the node, which people know the run by.
        run: The parameters of the flow `areal`.
    """
    tie_to_worker()
    log, node, api = get_run_logger().info, identity(), PREFECT_API_URL.value() or ""
    address = own_address(api)
    try:
        here: dict[str, Any] = {**run, "overrides": [*run["overrides"], f"launch.address={address}"]}
        config = configure(**here)
    except ArealError as error:
        return Failed(name=REFUSED, message=str(error))
    _say(f"{NODE}{node}")
    if wrong := troubles(config, by_role(config)[role], api):
        return Failed(name=BAD_NODE, message=f"node {node} ({address}) is no good: {'; '.join(wrong)}")
    _say(CHECKED)
    with Notice(log) as notice:
        try:
            if role == "trainer" and index == 0:
                lead(config, run_id, known_by, log, notice.text)
            else:
                follow(config, run_id, role, index, address, log, notice)
        except CancelUnheard:
            return Cancelled(message="The run was stopped; it can be resumed.")
        except ArealError as error:
            if notice.text() is None:
                return Failed(name=REFUSED if isinstance(error, HOPELESS) else None, message=str(error))
    if (why := notice.text()) is not None:
        return Completed(name=RECLAIMED, message=f"node {node} is reclaimed: {why}")
    return Completed()


def _say(tag: str) -> None:
    """By a tag of this flow run, which the flow that has provisioned the node reads."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(flow_run.id))
        client.update_flow_run(run.id, tags=[*run.tags, tag])
