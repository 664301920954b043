"""torchrun's agent for one machine's ranks, tied to the run like every other process.

`areal_core.run.remote_worker` supervises the agent. The agent waits for the rendezvous, then starts the ranks. When a
rank fails on any machine, the agents of all machines restart all ranks together, `launch.restarts` times. A rank that
ended while waiting for another machine's rank counts too. The agent exits with 0 when its ranks have ended, and with
EXIT_FINAL when they have failed too often.

This module changes torchrun in three ways:
- torchrun closes a rendezvous for good when an agent ends without a signal, loses the store or runs out of restarts.
  Here agents may return or be replaced, so no agent closes the rendezvous. It ends with the run.
- torchrun numbers ranks by the order of the machines' addresses. Here machine n has the nth block of ranks.
- The rendezvous state is a pickle in a store that anybody can write. Here agents sign it with the run's token, and
  read only signed states.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import hmac
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from areal_core.config.schema import RunConfig
from areal_core.errors import ProcessError
from areal_core.launch import children, logs, process
from areal_core.storage.rundir import RunDir
from areal_core.training.distributed.ranks import ADDRESS, RENDEZVOUS

logger = logging.getLogger(__name__)

BACKEND = "areal"  # its name in torchrun
_SIGNATURE_BYTES = hashlib.sha256().digest_size
_KEEP_ALIVE_S = 5  # seconds between two heartbeats of an agent, stamped with its own clock
_KEEP_ALIVE_MISSED = 6  # missed heartbeats before a machine leaves the round; clocks may differ by seconds
_POLL_S = 0.2
_HAS_SHUTDOWN = "shutdown_timeout" in (field.name for field in dataclasses.fields(LaunchConfig))  # torch 2.11 has none


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--address", required=True, help="IP address of this machine")
    parser.add_argument("--node", type=int, required=True, help="number of this machine among the training machines")
    arguments = parser.parse_args()
    logs.start("node")
    process.tie_to_parent()
    run = RunDir(arguments.run_dir)
    config = run.config()
    try:
        where = await_rendezvous(run, config.launch.start_timeout_s)
        os.environ |= {RENDEZVOUS: where, ADDRESS: arguments.address}
        register(run.token(), arguments.node)
        launch = elastic_launch(settings(run, config, where, arguments.address), sys.executable)
        launch("-m", "areal_core.training.trainer", "--run-dir", run.root)
    except ChildFailedError as error:
        logger.error("%s", _described(error))
        raise SystemExit(process.EXIT_FINAL) from None
    except SignalException as ending:
        raise SystemExit(128 + ending.sigval) from None
    except (ProcessError, RendezvousError) as error:
        reason = str(error) or type(error).__name__
        logger.error("%s", " ".join(reason.split()))
        raise SystemExit(1) from None


def await_rendezvous(run: RunDir, timeout_s: float) -> str:
    """Wait for the rendezvous and return its "<address>:<port>". Raises ProcessError."""
    deadline = time.monotonic() + timeout_s
    while (info := run.ready_info("rendezvous")) is None:
        if time.monotonic() > deadline:
            raise ProcessError(
                f"no rendezvous within {timeout_s:g} s (launch.start_timeout_s): the run has not started"
            )
        time.sleep(_POLL_S)
    return info["url"].removeprefix("tcp://")


def settings(run: RunDir, config: RunConfig, where: str, address: str) -> LaunchConfig:
    """Return the settings that torchrun's command line would give."""
    launch = config.launch
    patience_s = int(launch.stall_timeout_s) + 1  # after it the head node ends the run
    # Shorter than the time after which the supervisor kills the agent.
    shutdown: dict[str, Any] = {"shutdown_timeout": int(launch.stop_timeout_s / 2)} if _HAS_SHUTDOWN else {}
    return LaunchConfig(
        min_nodes=config.training.hosts,
        max_nodes=config.training.hosts,
        nproc_per_node=config.ranks_per_host,
        run_id=run.root.name,
        rdzv_backend=BACKEND,
        rdzv_endpoint=where,
        rdzv_configs={
            "is_host": False,
            "join_timeout": patience_s,
            "read_timeout": patience_s,  # for a response of the store
            "keep_alive_interval": _KEEP_ALIVE_S,
            "keep_alive_max_attempt": _KEEP_ALIVE_MISSED,
        },
        max_restarts=launch.restarts,
        local_addr=address,
        virtual_local_rank=launch.accelerator == "cuda",
        **shutdown,
    )


def _described(error: ChildFailedError) -> str:
    """Say which ranks ended how, on one line."""
    codes = sorted((rank, failure.exitcode) for rank, failure in error.failures.items())
    return "; ".join(f"rank {rank} {children.how_it_ended(code)}" for rank, code in codes)


class OpenRendezvous:
    """Wraps a torchrun handler: its rendezvous can't be closed, and its agent is always machine `node`."""

    def __init__(self, handler: RendezvousHandler, node: int) -> None:
        self._handler = handler
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round. Raises RendezvousStateError if another machine has the same number."""
        found = self._handler.next_rendezvous()
        if found.store.add(f"machine/{self._node}", 1) > 1:  # this store belongs to the current round
            raise RendezvousStateError(f"--node: two machines use the number {self._node}; give each machine its own")
        assert found.bootstrap_store_info is not None
        return RendezvousInfo(found.store, self._node, found.world_size, found.bootstrap_store_info)

    def set_closed(self) -> None:
        """Do nothing: the other agents continue."""

    def shutdown(self) -> bool:
        """Do nothing: this process's heartbeats end with it, so the others see that it has left."""
        return True


class SignedBackend(RendezvousBackend):
    """Wraps a backend and signs its state, so that only trusted states are unpickled.

    Raises RendezvousStateError for a state not signed with `key`.
    """

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
    """Register BACKEND with torchrun in this process.

    `key` is the run's token, `node` this machine's number among the training machines.
    """

    def opened(parameters: RendezvousParameters) -> Any:
        backend, store = create_backend(parameters)
        return OpenRendezvous(create_handler(store, SignedBackend(backend, key), parameters), node)

    # If agents shared their store with the ranks, a surviving agent would give the next round its old port, where a
    # new agent would wait in vain.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(BACKEND, opened)


if __name__ == "__main__":
    main()
