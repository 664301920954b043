"""`python -m areal_core.run.remote_worker`: runs a role of a run, or a share of one, on another machine.

    generation   generation servers, which listen on this machine's address and join the run's controller
    trainer      this machine's share of the ranks, under torchrun

The run's folder is shared with the head node, whose configuration leaves the role to remote workers
(`launch.remote_roles`). This command may be started first: it waits for the run. It ends by itself with 0 once the run
has ended in order, with 1 and one line when the run ended otherwise or the restart budget is spent; exit statuses are
those of areal_core.run.command.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, ConfigError, ProcessError
from areal_core.launch.logs import Journal, Source
from areal_core.launch.supervisor import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.run.command import Parser, run_command
from areal_core.run.machine import check_packages
from areal_core.run.registration import ServerRegistration
from areal_core.run.roles import interface, is_own, remote_generation, remote_trainer
from areal_core.storage.rundir import RunDir

_POLL_S = 1.0  # between two looks at the run
_NO_LAUNCHER_S = 10.0  # a run without a launcher for so long is over
_OWNER_S = 5.0  # beyond launch.stop_timeout_s, for the processes of an earlier command to end


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    options = _parse(arguments)
    interface(options.address)
    run = RunDir(options.run_dir)
    if not _await_run(run, options.wait):
        print(_ended(run))
        return
    config = run.config()
    _check_role(config, options)
    check_packages(config, {options.role})
    _check_address(config, options.address)
    with ExitStack() as locks:
        if options.role == "generation":
            count = options.servers or config.generation_servers
            held = _lock(run, config, "generation", range(options.first, options.first + count), locks)
            RemoteWorker(run, config, locks=held).generate(options.address, options.first, count)
        else:
            held = _lock(run, config, "trainer", range(options.node, options.node + 1), locks)
            RemoteWorker(run, config, locks=held).train(options.address, options.node)


class RemoteWorker:
    """This machine's processes of a run. Each method blocks, in the main thread, until the run has ended.

    Raises ProcessError when it ended without a summary, or when a process here has no restart left.
    """

    def __init__(
        self, run: RunDir, config: RunConfig, *, locks: tuple[int, ...] = (), log: Callable[[str], None] = print
    ) -> None:
        """`locks` are inherited by the processes here: a command that takes their place waits until they are gone."""
        self._run = run
        self._locks = locks
        self._config = config
        self._forward = self._log = log
        self._stop = StopSignal()
        self._failure: ArealError | None = None  # why this machine's part has ended, if not in order

    def generate(self, address: str, first: int, count: int) -> None:
        """Run `count` servers, from number `first` on. They are registered with the run's current controller, and
        started again when it has lost them."""
        self._keep_journal("host-generation", first)
        spec = remote_generation(self._run, self._config, address=address, first=first, count=count)
        known = ServerRegistration(self._run, ranks=self._config.trainer_processes, stop=self._stop, log=self._log)
        with known.running(self._guarded, self._config.launch.stop_timeout_s):
            self._supervise(spec, known.server_ready)

    def train(self, address: str, node: int) -> None:
        """Run the ranks of one machine, number `node`."""
        self._keep_journal("host-trainer", node)
        self._supervise(remote_trainer(self._run, self._config, address=address, node=node))

    def _keep_journal(self, role: str, index: int) -> None:
        """Log to a file of this command's from now on: a run may have several remote workers."""
        self._log = Journal(self._run.log_file(role, index), self._config.launch, Source(role, index), self._forward)

    def _supervise(self, spec: RoleSpec, on_ready: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        watching = threading.Thread(target=self._guarded, args=(self._watch,), name="watch", daemon=True)
        watching.start()
        supervisor = Supervisor(
            self._run,
            spec,
            self._config.launch,
            stop=self._stop,
            on_ready=on_ready,
            log=self._log,
            forward=self._forward,
            pass_fds=self._locks,
        )
        try:
            supervisor.run()
            watching.join()  # ranks are done before the run is
        finally:
            self._stop.set()
            watching.join(self._config.launch.stop_timeout_s)  # a look at a shared folder may take for ever
        if self._failure is not None:
            raise self._failure

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run `action` in a thread of this command: its error ends this machine's part."""
        try:
            action()
        except ArealError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ProcessError(f"--run-dir: can't look at {self._run.root}: {error.strerror or error}"))
        except Exception as error:
            what = " ".join(str(error).split())
            self._fail(ProcessError(f"{threading.current_thread().name}: {type(error).__name__}: {what}"))
            raise

    def _fail(self, error: ArealError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _watch(self) -> None:
        """Wait for the end of the run, then stop the processes here."""
        launcher_seen_at = time.monotonic()
        while not self._stop.wait(_POLL_S):
            if self._run.summary.exists():
                self._log(_ended(self._run))
                self._stop.set()
            elif FileLock.is_held(self._run.launcher_lock):
                launcher_seen_at = time.monotonic()
            elif time.monotonic() - launcher_seen_at > _NO_LAUNCHER_S:
                raise ProcessError(f"run {self._run.root.name} has ended and left no summary")


def _ended(run: RunDir) -> str:
    return f"run {run.root.name} has ended"


def _await_run(run: RunDir, patience_s: float) -> bool:
    """True once a launcher runs the run, False when it has ended in order. Raises ConfigError."""
    deadline = time.monotonic() + patience_s
    while not ((run.root / "run.json").exists() and FileLock.is_held(run.launcher_lock)):
        if run.summary.exists():
            return False
        if time.monotonic() >= deadline:
            raise ConfigError(f"--run-dir: nobody has started a run in {run.root} within {patience_s:g} s (--wait)")
        time.sleep(min(_POLL_S, patience_s))
    return True


def _lock(run: RunDir, config: RunConfig, role: str, share: range, locks: ExitStack) -> tuple[int, ...]:
    """One lock for each server or machine of a share: shares must not overlap. Waits for the processes of an earlier
    command to end. Raises ProcessError."""
    return tuple(
        locks.enter_context(
            FileLock(
                run.root / f"host-{role}-{index}.lock",
                timeout_s=config.launch.stop_timeout_s + _OWNER_S,
                busy=f"--run-dir: {role} {index} of run {run.root.name} is run by another command already",
            )
        ).fd
        for index in share
    )


def _check_role(config: RunConfig, options: argparse.Namespace) -> None:
    if options.role not in config.remote_roles:
        raise ConfigError(
            f"launch.remote_roles: must be {options.role} or both for another machine to take that role over, "
            f"got {config.launch.remote_roles!r}"
        )
    if options.role == "trainer" and options.node >= config.training.hosts:
        raise ConfigError(f"--node: must be at most {config.training.hosts - 1} (training.hosts), got {options.node}")
    if options.role == "generation":
        count = options.servers or config.generation_servers
        if options.first + count > config.generation_servers:
            raise ConfigError(
                f"--first: servers {options.first} to {options.first + count - 1} are more than the run has, "
                f"{config.generation_servers} (generation.servers); --servers says how many are here"
            )


def _check_address(config: RunConfig, address: str) -> None:
    """The head node, and ranks and servers here, must reach each other. Raises ConfigError."""
    head_node, here_alone = config.launch.address, ip_address(address).is_loopback
    if ip_address(head_node).is_loopback and not here_alone:
        raise ConfigError(
            f"launch.address: must be an address that other machines reach, got {head_node!r}; start the run with one"
        )
    if here_alone and not ip_address(head_node).is_loopback and not is_own(head_node):
        raise ConfigError(f"--address: must be an address that the head node, {head_node}, reaches, got {address!r}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m areal_core.run.remote_worker", description="Take over a role of a run on this machine."
    )
    roles = parser.add_subparsers(dest="role", required=True, parser_class=Parser)
    generation = roles.add_parser("generation", help="generation servers")
    trainer = roles.add_parser("trainer", help="ranks of the trainer")
    for role in (generation, trainer):
        role.add_argument("--run-dir", type=Path, required=True, help="the run's folder, shared with all its machines")
        role.add_argument("--address", type=_address, required=True, help="of this machine, for the others to reach")
        role.add_argument("--wait", type=float, default=600.0, help="seconds for the run to be started (600)")
    generation.add_argument("--first", type=_at_least(0), default=0, help="number of the first server here (0)")
    generation.add_argument("--servers", type=_at_least(1), help="how many run here; all of the run's unless said")
    trainer.add_argument("--node", type=_at_least(0), default=0, help="number of this machine among the training ones")
    return parser.parse_args(arguments)


def _address(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an IP address, got {text!r}") from None


def _at_least(low: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number, {low} at least, got {text!r}")
        return int(text)

    return whole


if __name__ == "__main__":
    sys.exit(main())
