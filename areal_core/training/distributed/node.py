"""torchrun's agent for one machine's share of the ranks, tied to the run as every other process is.

`areal_core.run.remote_worker` supervises it. It waits for the rendezvous, then starts the ranks, and starts all of them
again, in step with the agents of the other machines, when one of them fails on any machine: `launch.restarts` times,
where a rank that ended because it waited for another machine's counts too. It ends with 0 when its ranks have, with
SPENT when they have failed too often.

An agent that leaves does not close the rendezvous for the others, and each has the ranks of its own number.

torchrun closes a rendezvous for good when an agent ends for any reason but a signal, also one that has lost the store
for a while or whose ranks have failed too often. Agents of a run come back, or another command takes their place; the
rendezvous ends with the run.

torchrun gives ranks out by the order of the machines' addresses. Here machine n has the nth share of them.

Its state is a pickle in a store that takes everybody's writes. So it is signed with the run's token, and none but what
an agent of this run has written is read.
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

BACKEND = "areal"  # its name among torchrun's
_SIGNATURE_BYTES = hashlib.sha256().digest_size
_KEEP_ALIVE_S = 5  # between two heartbeats of an agent, stamped with its own machine's clock
_KEEP_ALIVE_MISSED = 6  # heartbeats, and its machine is out of the round; clocks may differ by a few seconds
_POLL_S = 0.2
_HAS_SHUTDOWN = "shutdown_timeout" in (field.name for field in dataclasses.fields(LaunchConfig))  # torch 2.11 has none


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--address", required=True, help="of this machine")
    parser.add_argument("--node", type=int, required=True, help="its number among those that train")
    arguments = parser.parse_args()
    logs.start("node")
    process.adopt()
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
        raise SystemExit(process.SPENT) from None
    except SignalException as ending:
        raise SystemExit(128 + ending.sigval) from None
    except (ProcessError, RendezvousError) as error:
        reason = str(error) or type(error).__name__
        logger.error("%s", " ".join(reason.split()))
        raise SystemExit(1) from None


def await_rendezvous(run: RunDir, timeout_s: float) -> str:
    """ "<address>:<port>" of the rendezvous, once it is ready. Raises ProcessError."""
    deadline = time.monotonic() + timeout_s
    while (info := run.ready_info("rendezvous")) is None:
        if time.monotonic() > deadline:
            raise ProcessError(f"no rendezvous in {timeout_s:g} s (launch.start_timeout_s): the run has not started")
        time.sleep(_POLL_S)
    return info["url"].removeprefix("tcp://")


def settings(run: RunDir, config: RunConfig, where: str, address: str) -> LaunchConfig:
    """The settings that torchrun's command line would give."""
    launch = config.launch
    patience_s = int(launch.stall_timeout_s) + 1  # beyond it the head node ends the run
    # Before the supervisor kills the agent.
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
    """Which ranks ended how, on one line."""
    codes = sorted((rank, failure.exitcode) for rank, failure in error.failures.items())
    return "; ".join(f"rank {rank} {children.how_it_ended(code)}" for rank, code in codes)


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


if __name__ == "__main__":
    main()
