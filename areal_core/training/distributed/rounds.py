"""torchrun's rendezvous for the agents of a run: an agent that leaves does not close it for the others, and each has
the ranks of its own number.

torchrun closes a rendezvous for good when an agent ends for any reason but a signal, also one that has lost the store
for a while or whose ranks have failed too often. Agents of a run come back, or another command takes their place; the
rendezvous ends with the run.

torchrun gives ranks out by the order of the machines' addresses. Here machine n has the nth share of them: rank 0 is
where the run's own folder is.

Its state is a pickle in a store that takes everybody's writes. So it is signed with the run's token, and none but what
an agent of this run has written is read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

BACKEND = "areal"  # its name among torchrun's
_SIGNATURE_BYTES = hashlib.sha256().digest_size


class OpenRendezvous:
    """Another handler of torchrun's, which can no longer close the rendezvous, and whose agent is machine `node` of
    every round."""

    def __init__(self, handler: RendezvousHandler, node: int) -> None:
        self._handler = handler
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises RendezvousStateError where another machine has this one's number."""
        found = self._handler.next_rendezvous()
        if found.store.add(f"machine/{self._node}", 1) > 1:  # its store is of this round alone
            raise RendezvousStateError(f"--node: two machines say that they are number {self._node}")
        assert found.bootstrap_store_info is not None
        return RendezvousInfo(found.store, self._node, found.world_size, found.bootstrap_store_info)

    def set_closed(self) -> None:
        """Does nothing: the others go on."""

    def shutdown(self) -> bool:
        """Does nothing: the heartbeats end with this process, which tells the others that it has left."""
        return True


class SignedBackend(RendezvousBackend):
    """Another backend, whose state carries a signature before it is read. Raises RendezvousStateError for one that
    nobody with the `key` has written."""

    def __init__(self, backend: RendezvousBackend, key: str) -> None:
        self._backend = backend
        self._key = key.encode()

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(self._signature(state) + state, token)
        return None if found is None else (self._checked(found[0]), *found[1:])

    def _checked(self, signed: bytes) -> bytes:
        signature, state = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError("the state of the rendezvous was not written by an agent of this run")
        return state

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, hashlib.sha256)


def register(key: str, node: int) -> None:
    """Make BACKEND known to torchrun, in this process; `key` is the run's token, `node` the number of this machine
    among those that train."""

    def opened(parameters: RendezvousParameters) -> Any:
        backend, store = create_backend(parameters)
        return OpenRendezvous(create_handler(store, SignedBackend(backend, key), parameters), node)

    # Where agents share their store with the ranks, one that stays gives the next round its port of the last one, at
    # which a new agent waits in vain.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(BACKEND, opened)
