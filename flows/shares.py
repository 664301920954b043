"""Shares of a run: Prefect flow runs of `areal-node/node`, which nodes take from their role's queue.

A secret block of Prefect holds the head node's address and the run's token, which other nodes need to join. The head
node writes the block, and the flow that destroys the nodes deletes it.

A node tags its flow run with its id (`node:ID`). The name of the final state tells the result of the share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Cancelling, Crashed

from areal_core.config.schema import RunConfig
from areal_core.errors import ProvisionError
from flows.fleet import ShareState, Stage
from flows.provision.nodes import Host
from flows.provision.request import ROLES, by_role, queue

DEPLOYMENT = "areal-node/node"
REAPER = "areal-reap/reap"  # deployment that destroys nodes without an owner
NODE = "node:"  # tag prefix, before the node's id
FINISH = "finish:"  # tag prefix, before the reason: the provisioning flow asks the run to end in order
_TRIES = 8  # tries of a request that a busy server refuses: some minutes
_BLOCK = "secret"  # block type
STATIC = "static"  # stands for the run id in names of given hosts
RECLAIMED, BAD_NODE, REFUSED = "Reclaimed", "BadNode", "Refused"  # names of final states

_BY_NAME = {RECLAIMED: Stage.RECLAIMED, BAD_NODE: Stage.BAD_NODE, REFUSED: Stage.REFUSED}
_BY_TYPE = {
    StateType.COMPLETED: Stage.DONE,
    StateType.FAILED: Stage.FAILED,
    StateType.CRASHED: Stage.FAILED,
    StateType.CANCELLED: Stage.CANCELLED,
}
_UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]


@dataclass(frozen=True)
class HeadAddress:
    url: str  # address of the head node's data server
    token: str


class Shares:
    """The shares of one run, given out through Prefect. Implements `flows.fleet.Work`."""

    def __init__(
        self, client: SyncPrefectClient, config: RunConfig, run_id: str, parameters: Mapping[str, Any]
    ) -> None:
        """Create the work queues.
        `parameters` are common to all shares of the run. Raises ProvisionError if the deployment or the work pool does
        not exist."""
        self._client, self._config, self._run, self._parameters = client, config, run_id, parameters
        self._pool = config.provision.work_pool
        try:
            self._deployment = client.read_deployment_by_name(DEPLOYMENT).id
        except ObjectNotFound:
            raise ProvisionError(
                f"Prefect has no deployment {DEPLOYMENT}; create it with `prefect --no-prompt deploy --all`"
            ) from None
        for role in by_role(config):
            try:
                with suppress(ObjectAlreadyExists):
                    client.create_work_queue(queue(config, run_id, role), work_pool_name=self._pool)
            except ObjectNotFound:
                raise ProvisionError(
                    f"provision.work_pool: must be a work pool of Prefect, got {self._pool!r}"
                ) from None
        left = _unfinished(client, run_id)  # adopts the shares of a killed flow
        self._left = {(run.parameters["role"], run.parameters["index"]): str(run.id) for run in left}

    def submit(self, role: str, index: int) -> str:
        if (left := self._left.pop((role, index), None)) is not None:
            return left
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _TRIES}):
            made = self._client.create_flow_run_from_deployment(
                self._deployment,
                name=f"{self._run} {role}-{index}",
                parameters={"run_id": self._run, "role": role, "index": index, **self._parameters},
                work_queue_name=queue(self._config, self._run, role),
                tags=[f"run:{self._run}"],
                job_variables={"working_dir": self._config.provision.software},
                idempotency_key=uuid4().hex,
            )
        return str(made.id)

    def states(self, ids: Iterable[str]) -> dict[str, ShareState]:
        chosen = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[UUID(each) for each in ids]))
        return {str(run.id): _state_of(run) for run in self._client.read_flow_runs(flow_run_filter=chosen)}

    def mark_lost(self, share: str, reason: str) -> None:
        self._client.set_flow_run_state(UUID(share), Crashed(message=reason), force=True)

    def heartbeat_age_s(self) -> dict[str, float]:
        return {node: silent for role in by_role(self._config) for node, silent in self._workers(role)}

    def hosts(self, role: str) -> list[Host]:
        """Hosts that serve a role's queue. Their names are numbered in the order of their ids."""
        near = [node for node, silent in self._workers(role) if silent < self._config.provision.lost_s]
        return [
            Host(name=f"{role}-{index}", role=role, address="", id=node, type="", spot=False)
            for index, node in enumerate(sorted(near))
        ]

    def _workers(self, role: str) -> Iterator[tuple[str, float]]:
        """Node id of each worker of a role, and seconds since its last heartbeat."""
        now, own = datetime.now(UTC), STATIC if self._config.provision.kind == "static" else self._run
        for worker in self._client.read_workers_for_work_pool(self._pool):
            if worker.name.startswith(f"{own}-{role}-") and worker.last_heartbeat_time is not None:
                silent = (now - worker.last_heartbeat_time).total_seconds()
                yield worker.name.removeprefix(f"{own}-{role}-"), max(0.0, silent)

    def stop(self) -> bool:
        """Cancel all unfinished shares. Return whether none is left."""
        unfinished = _unfinished(self._client, self._run)
        for run in unfinished:
            waits = run.state is None or run.state.type in (StateType.SCHEDULED, StateType.PENDING)
            if waits or (run.state is not None and run.state.type is not StateType.CANCELLING):
                state = Cancelled() if waits else Cancelling()
                self._client.set_flow_run_state(run.id, state, force=waits)
        return not unfinished

    def close(self) -> None:
        """Give out no more shares: delete the run's queues and its secret block."""
        forget(self._client, self._run, self._pool)


def forget(client: SyncPrefectClient, run_id: str, pool: str) -> None:
    """Delete Prefect's records of a run without nodes: unfinished shares, queues, and its secret block.

    The caller holds the run's lease. Queues have ids, but a later flow reuses existing queues. If a late call deletes a
    queue in use, Prefect recreates it with the next share."""
    for run in _unfinished(client, run_id):
        client.set_flow_run_state(run.id, Cancelled(message="Its node was destroyed."), force=True)
    for role in ROLES:
        with suppress(ObjectNotFound):
            client.delete_work_queue_by_id(client.read_work_queue_by_name(f"{run_id}-{role}", work_pool_name=pool).id)
    with suppress(ObjectNotFound):
        document = client.read_block_document_by_name(_block(run_id), _BLOCK, include_secrets=False)
        client.delete_block_document(document.id)


def publish_head(run_id: str, address: HeadAddress) -> None:
    """Write the head node's address and token to the secret block, over any earlier ones."""
    block: Any = Secret  # Any: Secret[str] would be another block type for Prefect
    block(value=json.dumps(asdict(address))).save(_block(run_id), overwrite=True)


def head_address(run_id: str) -> HeadAddress | None:
    """The head node's address and token; None if no head node is up.
    Raises httpx.HTTPError if Prefect's server is down."""
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        document = client.read_block_document_by_name(_block(run_id), _BLOCK, include_secrets=True)
        return HeadAddress(**json.loads(document.data["value"]))
    return None


def _block(run_id: str) -> str:
    """Name of the run's secret block. Prefect allows lowercase letters, digits and dashes."""
    return f"areal-run-{re.sub('[^a-z0-9]+', '-', run_id.lower())}"


def tags_of(client: SyncPrefectClient, flow_run_id: str) -> list[str]:
    """Tags of a flow run. A run's flow and its nodes exchange messages by tags."""
    return client.read_flow_run(UUID(flow_run_id)).tags


def add_tag(client: SyncPrefectClient, flow_run_id: str, tag: str) -> None:
    tags = tags_of(client, flow_run_id)
    if tag not in tags:
        client.update_flow_run(UUID(flow_run_id), tags=[*tags, tag])


def _unfinished(client: SyncPrefectClient, run_id: str) -> list[FlowRun]:
    chosen = filters.FlowRunFilter(
        tags=filters.FlowRunFilterTags(all_=[f"run:{run_id}"]),
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_UNFINISHED)),
    )
    return client.read_flow_runs(flow_run_filter=chosen)


def _state_of(run: FlowRun) -> ShareState:
    node = next((tag.removeprefix(NODE) for tag in run.tags if tag.startswith(NODE)), None)
    state = run.state
    message = (state and state.message) or ""
    if state is None or (node is None and not state.is_final()):
        return ShareState(Stage.WAITING, None, message)
    if state.is_final():
        return ShareState(_BY_NAME.get(state.name or "", _BY_TYPE[state.type]), node, message)
    return ShareState(Stage.RUNNING, node, message)
