"""Shares of a run, as flow runs of `areal-node/node` that nodes take from the queues of their roles.

Where a run's head node is, and the run's token, which its other nodes need to join, is in a secret block of Prefect's:
the head node writes it, and the flow that ends the nodes deletes it.

A node says by a tag of its flow run where it is (`node:ID`), and by the name of the final state what has become of its
share.
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
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Cancelling, Crashed

from areal_core.config.schema import RunConfig
from areal_core.errors import ProvisionError
from flows.fleet import Seen, Stage
from flows.provision.nodes import Host
from flows.provision.request import ROLES, by_role, queue

DEPLOYMENT = "areal-node/node"
REAPER = "areal-reap/reap"  # another one: ends nodes that nobody has
NODE = "node:"  # and its id
FINISH = "finish:"  # said by the flow that has provisioned the nodes: the run is to end in order, and why
_TRIES = 8  # of a request that a busy server refuses: some minutes
_BLOCK = "secret"  # type of the block
STATIC = "static"  # the run of hosts that are given
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
class Whereabouts:
    url: str  # of the head node's data server
    token: str


class Shares:
    """The shares of one run, given out through Prefect: a `flows.fleet.Work`."""

    def __init__(
        self, client: SyncPrefectClient, config: RunConfig, run_id: str, parameters: Mapping[str, Any]
    ) -> None:
        """`parameters` are what every share of the run has in common. Raises ProvisionError where the deployment or the
        work pool is not there."""
        self._client, self._config, self._run, self._parameters = client, config, run_id, parameters
        self._pool = config.provision.work_pool
        try:
            self._deployment = client.read_deployment_by_name(DEPLOYMENT).id
        except ObjectNotFound:
            raise ProvisionError(f"{DEPLOYMENT}: Prefect has no such deployment: `prefect deploy --all`") from None
        for role in by_role(config):
            try:
                with suppress(ObjectAlreadyExists):
                    client.create_work_queue(queue(config, run_id, role), work_pool_name=self._pool)
            except ObjectNotFound:
                raise ProvisionError(f"provision.work_pool: Prefect has no work pool {self._pool}") from None
        left = _unfinished(client, run_id)  # those of a flow that was killed go on
        self._left = {(run.parameters["role"], run.parameters["index"]): str(run.id) for run in left}

    def give(self, role: str, index: int) -> str:
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

    def seen(self, ids: Iterable[str]) -> dict[str, Seen]:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(each) for each in ids]))
        return {str(run.id): _seen(run) for run in self._client.read_flow_runs(flow_run_filter=chosen)}

    def lose(self, share: str, reason: str) -> None:
        self._client.set_flow_run_state(UUID(share), Crashed(message=reason), force=True)

    def silent_s(self) -> dict[str, float]:
        return {node: silent for role in by_role(self._config) for node, silent in self._workers(role)}

    def hosts(self, role: str) -> list[Host]:
        """Hosts that are there and serve the queue of a role. They have no names but what they have of each other."""
        near = [node for node, silent in self._workers(role) if silent < self._config.provision.lost_s]
        return [
            Host(name=f"{role}-{index}", role=role, address="", id=node, type="", spot=False)
            for index, node in enumerate(sorted(near))
        ]

    def _workers(self, role: str) -> Iterator[tuple[str, float]]:
        """The node of each worker of a role, and for how many seconds it has been silent."""
        now, own = datetime.now(UTC), STATIC if self._config.provision.kind == "static" else self._run
        for worker in self._client.read_workers_for_work_pool(self._pool):
            if worker.name.startswith(f"{own}-{role}-") and worker.last_heartbeat_time is not None:
                silent = (now - worker.last_heartbeat_time).total_seconds()
                yield worker.name.removeprefix(f"{own}-{role}-"), max(0.0, silent)

    def stop(self) -> bool:
        """Have all shares end that have not; whether there are none any more."""
        unfinished = _unfinished(self._client, self._run)
        for run in unfinished:
            waits = run.state is None or run.state.type in (StateType.SCHEDULED, StateType.PENDING)
            if waits or (run.state is not None and run.state.type is not StateType.CANCELLING):
                state = Cancelled() if waits else Cancelling()
                self._client.set_flow_run_state(run.id, state, force=waits)
        return not unfinished

    def close(self) -> None:
        """Nothing is given out any more."""
        forget(self._client, self._run, self._pool)


def forget(client: SyncPrefectClient, run_id: str, pool: str) -> None:
    """Remove what Prefect has of a run whose nodes are ended, for the holder of its lease: shares that have not ended,
    the queues of its own, and where its head node was. Queues have ids, but a later flow takes over those that are
    there: should a call come late, Prefect makes the queue anew with the next share."""
    for run in _unfinished(client, run_id):
        client.set_flow_run_state(run.id, Cancelled(message="Its node is gone."), force=True)
    for role in ROLES:
        with suppress(ObjectNotFound):
            client.delete_work_queue_by_id(client.read_work_queue_by_name(f"{run_id}-{role}", work_pool_name=pool).id)
    with suppress(ObjectNotFound):
        document = client.read_block_document_by_name(_block(run_id), _BLOCK, include_secrets=False)
        client.delete_block_document(document.id)


def publish(run_id: str, where: Whereabouts) -> None:
    """In the place of what was said before."""
    block: Any = Secret  # of which Prefect knows no kinds: Secret[str] would be another type of block
    block(value=json.dumps(asdict(where))).save(_block(run_id), overwrite=True)


def whereabouts(run_id: str) -> Whereabouts | None:
    """None while no head node is up. Raises httpx.HTTPError while Prefect's server is away."""
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        document = client.read_block_document_by_name(_block(run_id), _BLOCK, include_secrets=True)
        return Whereabouts(**json.loads(document.data["value"]))
    return None


def _block(run_id: str) -> str:
    """Prefect's names are of small letters, digits and dashes."""
    return f"areal-run-{re.sub('[^a-z0-9]+', '-', run_id.lower())}"


def tags_of(client: SyncPrefectClient, flow_run_id: str) -> list[str]:
    """By which the flow of a run and those of its nodes tell each other what is to be known."""
    return client.read_flow_run(UUID(flow_run_id)).tags


def mark(client: SyncPrefectClient, flow_run_id: str, tag: str) -> None:
    tags = tags_of(client, flow_run_id)
    if tag not in tags:
        client.update_flow_run(UUID(flow_run_id), tags=[*tags, tag])


def _unfinished(client: SyncPrefectClient, run_id: str) -> list[FlowRun]:
    chosen = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[f"run:{run_id}"]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNFINISHED)),
    )
    return client.read_flow_runs(flow_run_filter=chosen)


def _seen(run: FlowRun) -> Seen:
    node = next((tag.removeprefix(NODE) for tag in run.tags if tag.startswith(NODE)), None)
    state = run.state
    message = (state and state.message) or ""
    if state is None or (node is None and not state.is_final()):
        return Seen(Stage.WAITS, None, message)
    if state.is_final():
        return Seen(_BY_NAME.get(state.name or "", _BY_TYPE[state.type]), node, message)
    return Seen(Stage.RUNS, node, message)
