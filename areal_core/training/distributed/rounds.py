"""torchrun's rendezvous for the agents of a run: an agent that leaves does not close it for the others.

torchrun closes a rendezvous for good when an agent ends for any reason but a signal, also one that has lost the store
for a while or whose ranks have failed too often. Agents of a run come back, or another command takes their place; the
rendezvous ends with the run.
"""

from __future__ import annotations

import os

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

BACKEND = "areal"  # its name among torchrun's


class OpenRendezvous(RendezvousHandler):
    """Another handler, which can no longer close the rendezvous."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._handler.next_rendezvous()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Does nothing: the others go on."""

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Does nothing: the heartbeats end with this process, which tells the others that it has left."""
        return True


def register() -> None:
    """Make BACKEND known to torchrun, in this process."""
    # Where agents share their store with the ranks, one that stays gives the next round its port of the last one, at
    # which a new agent waits in vain.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(BACKEND, _open)


def _open(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    return OpenRendezvous(create_handler(store, backend, parameters))
