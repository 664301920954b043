"""Where a run's head node is, and the run's token: what its other nodes need to join. A secret block of Prefect's,
which the head node writes and the flow that ends the nodes deletes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound

_TYPE = "secret"  # of the block


@dataclass(frozen=True)
class Whereabouts:
    url: str  # of the head node's data server
    token: str


def tell(run_id: str, whereabouts: Whereabouts) -> None:
    """In the place of what was told before."""
    block: Any = Secret  # of which Prefect knows no kinds: Secret[str] would be another type of block
    block(value=json.dumps(asdict(whereabouts))).save(_name(run_id), overwrite=True)


def ask(run_id: str) -> Whereabouts | None:
    """None while no head node is up. Raises httpx.HTTPError while Prefect's server is away."""
    with get_client(sync_client=True) as client:
        try:
            document = client.read_block_document_by_name(_name(run_id), _TYPE, include_secrets=True)
        except ObjectNotFound:
            return None
    return Whereabouts(**json.loads(document.data["value"]))


def forget(run_id: str, client: SyncPrefectClient) -> None:
    try:
        document = client.read_block_document_by_name(_name(run_id), _TYPE, include_secrets=False)
        client.delete_block_document(document.id)
    except ObjectNotFound:
        return


def _name(run_id: str) -> str:
    """Prefect's names are of small letters, digits and dashes."""
    return f"areal-run-{re.sub('[^a-z0-9]+', '-', run_id.lower())}"
