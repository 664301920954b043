"""The rendezvous process of ranks on several machines: a store that outlives those machines.

torchrun's agents agree there on the members of a round. The ranks find each other there and report missing ones.
"""

from __future__ import annotations

import argparse
import signal
import socket
from pathlib import Path

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal_core.launch import logs, process

_BACKLOG = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", required=True, help="IP address to listen on; the kernel chooses the port")
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    logs.start("rendezvous")
    process.tie_to_parent(arguments.ready_file)
    listening = socket.create_server(
        (arguments.address, 0),
        family=socket.AF_INET6 if ":" in arguments.address else socket.AF_INET,
        backlog=_BACKLOG,
    )
    port = listening.getsockname()[1]
    store = TCPStore(
        arguments.address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # otherwise it would listen on all interfaces
    )
    process.announce_ready(arguments.ready_file, f"tcp://{arguments.address}:{store.port}")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
