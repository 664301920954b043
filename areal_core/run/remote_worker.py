"""`python -m areal_core.run.remote_worker`: run a role, or a share of one, on another machine.

    generation   generation servers, which listen on this machine's address and join the run's controller
    trainer      this machine's share of the ranks, under torchrun
    rewards      reward workers, beside those of the head node: any machine, any number, at any time

The head node's configuration leaves the first two to remote workers (`launch.remote_roles`). This machine keeps a copy
of the run's folder, which the head node's data server fills. This command may be started first: it waits for the run.
At SIGUSR1 the machine leaves the run: its servers hand over their completions. The command exits with 0 once the run
has ended in order, or once the machine has left the run. It exits with 1 and one line if the run ended otherwise or the
restart budget is spent. Other exit statuses are those of areal_core.run.command. Programs use RemoteWorker, in any
thread.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from areal_core.api.head import Head, checked_url
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, ConfigError
from areal_core.generation.command_line import read_token
from areal_core.launch.logs import Journal
from areal_core.launch.supervisor import RoleSpec, StopSignal
from areal_core.run.command import Parser, run_command
from areal_core.run.registration import ServerRegistration
from areal_core.run.remote.copied import POLL_S, RunCopy, RunLostError, ShareResources
from areal_core.run.remote.share import GENERATION, TRAINER, Share, places
from areal_core.run.roles import generation, interface, interface_of, remote_rewards, training_node
from areal_core.run.supervision import Supervision

__all__ = ["Head", "RemoteWorker", "RunCopy", "RunLostError", "Share", "main"]

_LEAVE = signal.SIGUSR1


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    options = _parse(arguments)
    share = Share(role=options.role, first=options.first, count=options.count)
    head = Head(checked_url(options.head), read_token(options.token_file))
    worker = RemoteWorker(share, RunCopy(head, options.folder), options.address)
    signal.signal(_LEAVE, lambda *_: worker.leave(f"it received {_LEAVE.name}"))
    worker.work(options.wait)


class RemoteWorker:
    """This machine's share of a run. `leave` may be called from any thread and from signal handlers."""

    def __init__(self, share: Share, folder: RunCopy, address: str, *, log: Callable[[str], None] = print) -> None:
        """`address` is this machine's. Raises ConfigError if no network interface has the address."""
        interface(address)
        self._share = share
        self._folder = folder
        self._address = address
        self._forward = self._log = log
        self._stop = StopSignal()
        self._registration: ServerRegistration | None = None
        self._leave_reason: str | None = None  # why this machine leaves the run; None while it takes part
        self._supervision: Supervision | None = None  # None until the run is found

    def work(self, wait_s: float = 600.0) -> Literal["ended", "left"]:
        """Run this machine's share until the run has ended in order, or until this machine has left the run.

        Waits at most `wait_s` seconds for the run to start. All processes started here have ended on return.

        Raises ConfigError and others for a share that can't be taken over. Raises RunLostError if the run ended without
        a summary or can't be reached. Raises ProcessError if a process here has no restart left.
        """
        try:
            self._work(wait_s)
        except ArealError as error:
            if self._supervision is not None and self._supervision.failure is not None:
                raise self._supervision.failure from None
            if not self._is_leaving:
                raise
            self._log(f"the work was interrupted: {error}")
            self._log_end()
        return "ended" if self._leave_reason is None else "left"

    def leave(self, reason: str) -> None:
        """Let this machine's servers leave the run, which keeps their completions; `work` then returns."""
        self._leave_reason = reason
        if self._registration is not None:
            self._registration.leave()
        else:
            self._stop.set()

    @property
    def _is_leaving(self) -> bool:
        return self._leave_reason is not None and self._stop.is_set()

    def _work(self, wait_s: float) -> None:
        config = self._folder.find(wait_s, self._stop)
        if config is None:
            self._log_end()
            return
        share = self._share.with_count(config)
        _check_address(config, self._address)
        roles = self._supervision = Supervision(
            self._folder.run,
            config.launch,
            log=lambda line: self._log(line),
            forward=self._forward,
            end=self._stop.set,
            counts=lambda _: not self._is_leaving,  # errors after leaving are consequences of it
        )
        with self._folder.own_share(share, config, self._address, supervision=roles, stop=self._stop) as resources:
            # Log to a file of this command's own from now on:
            file = resources.run.log_file(share.journal, share.first)
            self._log = Journal(file, f"{share.journal}-{share.first}", self._forward)
            with roles.thread("watch", lambda: self._watch(resources)):
                if share.role == GENERATION:
                    self._generate(roles, resources, config, share)
                else:
                    roles.run(self._spec(resources, config, share), self._stop, locks=resources.locks)
            if roles.failure is not None:
                raise roles.failure
            self._log_end()

    def _spec(self, resources: ShareResources, config: RunConfig, share: Share) -> RoleSpec:
        if share.role == TRAINER:
            return training_node(resources.run, config, address=self._address, node=share.first)
        its = places(config, share)
        return remote_rewards(resources.run, first=its.start, count=len(its))

    def _generate(self, roles: Supervision, resources: ShareResources, config: RunConfig, share: Share) -> None:
        """Run the generation servers, register them with the current controller, and restart the lost ones."""
        first, count = share.first, len(share.indices)
        spec = generation(resources.run, config, address=self._address, first=first, count=count)
        known = self._registration = ServerRegistration(
            resources.run, ranks=config.trainer_processes, stop=self._stop, stager=resources.stager, log=self._log
        )
        if self._leave_reason is not None:
            known.leave()
        with known.running(roles, config.launch.stop_timeout_s):
            roles.run(spec, self._stop, known.server_ready, locks=resources.locks)

    def _log_end(self) -> None:
        if self._leave_reason is None:
            self._log(f"run {self._folder.run.root.name} has ended")
        else:
            self._log(f"this machine leaves the run: {self._leave_reason}")

    def _watch(self, resources: ShareResources) -> None:
        """Wait for the end of the run, then stop the processes here."""
        while not self._stop.wait(POLL_S):
            if resources.ended():
                self._stop.set()


def _check_address(config: RunConfig, address: str) -> None:
    """Check that the head node, and ranks and servers here, can reach each other. Raises ConfigError."""
    head_node, here_alone = config.launch.address, ip_address(address).is_loopback
    if ip_address(head_node).is_loopback and not here_alone:
        raise ConfigError(
            f"launch.address: must be an address that other machines reach, got {head_node!r}; start the run with "
            "such an address"
        )
    if here_alone and not ip_address(head_node).is_loopback and interface_of(head_node) is None:
        raise ConfigError(f"--address: must be an address that the head node, {head_node}, reaches, got {address!r}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_core.run.remote_worker", description="Take over a role of a run on this machine."
    )
    roles = parser.add_subparsers(dest="role", required=True, parser_class=Parser)
    servers = roles.add_parser("generation", help="generation servers")
    trainer = roles.add_parser("trainer", help="ranks of the trainer")
    rewards = roles.add_parser("rewards", help="reward workers")
    for role in (servers, trainer, rewards):
        role.add_argument("--head", required=True, help="URL of the head node's data server")
        role.add_argument("--token-file", type=Path, required=True, help="a copy of the run's file `token`")
        role.add_argument("--folder", type=Path, required=True, help="folder for this command's copy of the run")
        role.add_argument("--address", required=True, help="IP address of this machine that the other machines reach")
        role.add_argument("--wait", type=float, default=600.0, help="seconds to wait for the start of the run (600)")
    servers.add_argument("--first", type=_at_least(0), default=0, help="number of the first server here (0)")
    servers.add_argument(
        "--servers", dest="count", type=_at_least(1), help="number of servers here; default: all servers of the run"
    )
    trainer.add_argument(
        "--node",
        dest="first",
        type=_at_least(0),
        required=True,
        help="number of this machine among the training machines; the head node is 0",
    )
    trainer.set_defaults(count=None)
    cores = len(os.sched_getaffinity(0))
    rewards.add_argument(
        "--first",
        type=_at_least(0),
        default=0,
        help="number of the first worker here, among the workers of all other machines (0)",
    )
    rewards.add_argument(
        "--workers",
        dest="count",
        type=_at_least(1),
        default=cores,
        help=f"number of workers here (one per core: {cores})",
    )
    return parser.parse_args(arguments)


def _at_least(low: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, got {text!r}")
        return int(text)

    return whole


if __name__ == "__main__":
    sys.exit(main())
