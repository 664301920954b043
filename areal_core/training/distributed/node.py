"""torchrun's agent for one machine's share of the ranks, tied to the run as every other process is.

`areal_core.run.remote_worker` supervises it. It waits for the rendezvous, then starts the ranks, and starts all of them
again, in step with the agents of the other machines, when one of them fails on any machine: `launch.restarts` times,
where a rank that ended because it waited for another machine's counts too. It ends with 0 when its ranks have, with
SPENT when they have failed too often.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from areal_core.config.schema import RunConfig
from areal_core.errors import ProcessError
from areal_core.launch import logs, process
from areal_core.storage.rundir import RunDir
from areal_core.training.distributed import rounds
from areal_core.training.distributed.ranks import ADDRESS, RENDEZVOUS

logger = logging.getLogger(__name__)

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
        rounds.register(run.token(), arguments.node)
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
        rdzv_backend=rounds.BACKEND,
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
    ends = (
        f"rank {rank} {f'was killed by {signal.Signals(-code).name}' if code < 0 else f'exited with code {code}'}"
        for rank, code in sorted((rank, failure.exitcode) for rank, failure in error.failures.items())
    )
    return "; ".join(ends)


if __name__ == "__main__":
    main()
