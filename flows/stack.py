"""The local servers: Prefect's server, MLflow's, and a worker for the pool `areal-local`.

A supervisor process (`python -m flows.stack`) starts all three at once, in their own sessions, and ends them in order.
`areal up` leaves it running as a daemon. Under `areal train`, `compare` and `evaluate` it ends with the command. The
supervisor holds the lock `.areal/stack.lock` while it lives, so a checkout has one stack and a stale pid is harmless.
`.areal/stack.json` holds the servers' addresses. Prefect's server and MLflow are restarted a few times, while runs
continue. If the worker ends, the stack ends. A server that the environment names is used and not started:
PREFECT_API_URL, an explicit Prefect profile, or MLFLOW_TRACKING_URI. AREAL_STATE_DIR replaces `.areal`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import select
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areal_core.config.fields import refuse_credentials
from areal_core.config.groups import MLFLOW_CREDENTIALS
from areal_core.errors import ArealError, ConfigError, ProcessError
from areal_core.launch import children, process
from areal_core.launch.logs import LogFile
from areal_core.launch.supervisor import FileLock
from areal_core.launch.sweeper import end_marked
from areal_core.storage.rundir import write_json
from flows.places import STATE, WORK
from flows.services import GRACE_S, MARK, ORPHAN_GRACE_S, Services

LOGS = STATE / "logs"
WORKER_READY = STATE / "worker-ready.json"

CommandOwner = Literal["train", "compare", "evaluate"]  # commands whose stack ends with them
Owner = Literal["up", CommandOwner]

ONLY_WORKER = "sole"  # argument for the worker: no other worker serves this Prefect server
_LOCK_TIMEOUT_S = 0.5  # a check for a running stack may hold the lock this long
_claims: list[socket.socket] = []  # claims of ports, for the life of this process
_RESTARTS = 3
_WORKER_GRACE_S = 45.0  # Prefect gives a flow run 30 s to end


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A running stack."""

    owner: Owner
    pid: int  # pid of the supervisor
    prefect_api: str | None  # None: an explicit Prefect profile names it
    mlflow_uri: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for processes that use this stack."""
        return prefect_environment(self.prefect_api) | {"MLFLOW_TRACKING_URI": self.mlflow_uri}

    @property
    def pages(self) -> str:
        prefect = self.prefect_api.removesuffix("/api") if self.prefect_api else "as in its profile"
        return f"Prefect {prefect}   MLflow {self.mlflow_uri}"


def prefect_environment(api_url: str | None) -> dict[str, str]:
    """Settings for every process that imports Prefect. Existing environment variables win."""
    settings = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",  # no block is used; saves a second at the start
        "PREFECT_WORKER_QUERY_SECONDS": "5",  # shorter intervals lock the server's SQLite too often
        "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
    }
    if "PREFECT_PROFILE" not in os.environ:
        settings["PREFECT_HOME"] = str(STATE / "prefect")
    if api_url is not None:
        settings["PREFECT_API_URL"] = api_url
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def running() -> Stack | None:
    """The running stack of this checkout; None if there is none."""
    file = STATE / "stack.json"
    return Stack(**json.loads(file.read_text())) if FileLock.is_held(STATE / "stack.lock") and file.exists() else None


class Launch:
    """The supervisor, seen from the command that started it."""

    def __init__(self, owner: Owner) -> None:
        """Start the supervisor; return at once."""
        LOGS.mkdir(parents=True, exist_ok=True)
        reports, report = os.pipe()
        self._reports = open(reports, "rb", buffering=0)  # noqa: SIM115 - open while the supervisor lives
        self._mark = secrets.token_hex(8)
        # In its own session, Ctrl-C reaches only the command, which ends the stack in order. The stack of `areal up`
        # outlives the command.
        self._process = children.start(
            "stack",
            [sys.executable, "-m", "flows.stack", owner, str(report)],
            log=LogFile(LOGS / "stack.log"),
            environment={MARK: self._mark},
            grace_s=_WORKER_GRACE_S + 2 * GRACE_S,
            cwd=WORK,
            pass_fds=(report,),
            outlives=owner == "up",
        )
        os.close(report)

    def wait_ready(self) -> Stack:
        """Wait until the stack is up. Raises ConfigError or ProcessError, one line, if it can't be started."""
        died = {"error": f"the servers' supervisor died while starting; see {LOGS / 'stack.log'}"}
        report = json.loads(self._reports.readline() or json.dumps(died))
        if "error" in report:
            self._process.status()
            raise (ConfigError if report.get("user") else ProcessError)(report["error"])
        os.set_blocking(self._reports.fileno(), False)
        return Stack(**report)

    def new_messages(self, timeout_s: float = 0.0) -> list[str]:
        """New messages for the user, one line each. Waits up to `timeout_s` seconds for the first.

        Raises ProcessError, naming the dead process, once the stack has ended by itself."""
        select.select([self._reports], [], [], timeout_s)
        said = self._reports.read()  # None: no news
        if said == b"":
            raise ProcessError(f"the servers' supervisor has died; see {LOGS / 'stack.log'}")
        messages = [json.loads(line) for line in (said or b"").splitlines()]
        for message in messages:
            if "error" in message:
                raise ProcessError(message["error"])
        return [message["news"] for message in messages]

    def stop(self, *, at_once: bool = False) -> None:
        """End all processes of the stack, in order or `at_once` (SIGKILL), and wait for their end."""
        self._process.send(signal.SIGKILL if at_once else signal.SIGTERM)
        self._process.status()
        end_marked(f"{MARK}={self._mark}", 0.0 if at_once else ORPHAN_GRACE_S + GRACE_S)  # an orderly end leaves none
        self._process.reap()


def stop(stack: Stack) -> None:
    """End a stack that another command started, and wait for its end.
    Raises ProcessError if it does not end."""
    try:
        supervisor = os.pidfd_open(stack.pid)
    except ProcessLookupError:
        return
    with contextlib.closing(os.fdopen(supervisor)):
        signal.pidfd_send_signal(supervisor, signal.SIGTERM)
        if not select.select([supervisor], [], [], _WORKER_GRACE_S + 3 * GRACE_S)[0]:
            raise ProcessError(
                f"the servers' supervisor (pid {stack.pid}) did not stop in time; see {LOGS / 'stack.log'}"
            )


# ---- the supervisor ----


def serve(owner: Owner, report: int) -> int:
    """Supervise: start the servers, report, watch until asked to end, and end them; return the exit code.

    Writes one line of JSON per report to the descriptor `report`: first the stack or an error, then later events. The
    command `areal up` reads the first line only."""

    def say(message: Mapping[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader is gone, or needs only the first line
            os.write(report, json.dumps(message).encode() + b"\n")

    def fail(error: ArealError) -> int:
        print(f"areal: error: {error}", file=sys.stderr, flush=True)
        say({"error": str(error), "user": isinstance(error, ConfigError)})
        return 1

    try:
        with _lock(), Services(cwd=WORK, logs=LOGS) as services:
            try:
                if owner != "up":
                    process.tie_to_parent()
                stack = _start(services, owner)
                write_json(STATE / "stack.json", dataclasses.asdict(stack))
                say(dataclasses.asdict(stack))
                for line in services.watch():
                    print(line, file=sys.stderr, flush=True)
                    say({"news": line})
            except ArealError as error:
                return fail(error)  # reported before the servers end, which may take a while
    except ProcessError as error:
        return fail(error)
    return 0


def _start(services: Services, owner: Owner) -> Stack:
    """Start all servers that the environment doesn't name, and wait until they respond."""
    prefect_api, mlflow_uri = os.environ.get("PREFECT_API_URL"), os.environ.get("MLFLOW_TRACKING_URI")
    refuse_credentials("PREFECT_API_URL", prefect_api, "set PREFECT_API_AUTH_STRING")
    refuse_credentials("MLFLOW_TRACKING_URI", mlflow_uri, MLFLOW_CREDENTIALS)
    probes: dict[str, Callable[[], bool]] = {"worker": WORKER_READY.exists}
    worker = [sys.executable, "-m", "flows.worker"]
    if prefect_api is None and "PREFECT_PROFILE" not in os.environ:
        port = _port("PREFECT_PORT", 4200)
        prefect_api = f"http://127.0.0.1:{port}/api"
        argv = [sys.executable, "-m", "flows.prefect_server", "--host", "127.0.0.1", "--port", str(port)]
        # Prefect's default lets any website open in a local browser make the worker run commands.
        pages = ",".join(f"http://{host}:{port}" for host in ("127.0.0.1", "localhost"))
        settings = prefect_environment(prefect_api) | {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": pages}
        services.start("prefect-server", argv, settings, restarts=_RESTARTS)
        probes["prefect-server"] = lambda: responds(f"{prefect_api}/health")
        worker.append(ONLY_WORKER)
    if mlflow_uri is None:
        port = _port("MLFLOW_PORT", 5000)
        mlflow_uri = f"http://127.0.0.1:{port}"
        services.start("mlflow", _mlflow_argv(port), MLFLOW_ENVIRONMENT, needed=False, restarts=_RESTARTS)
        probes["mlflow"] = lambda: responds(f"{mlflow_uri}/health")
    stack = Stack(owner=owner, pid=os.getpid(), prefect_api=prefect_api, mlflow_uri=mlflow_uri)
    WORKER_READY.unlink(missing_ok=True)
    services.start("worker", worker, stack.environment, _WORKER_GRACE_S, sessions=True)
    services.until_ready(probes)
    return stack


MLFLOW_ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _mlflow_argv(port: int) -> list[str]:
    folder = STATE / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    # Without the server as proxy, `python -m areal_core`, which opens the same database, can write artifacts too.
    artifacts = ["--no-serve-artifacts", "--default-artifact-root", f"file://{folder}/artifacts"]
    return [*argv, "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", *artifacts]


def _lock() -> FileLock:
    """Lock of this checkout's stack. The kernel releases it when this process ends for any reason."""
    busy = f"servers already run in {STATE.parent}; stop those of `areal up` with `areal down`"
    return FileLock(STATE / "stack.lock", timeout_s=_LOCK_TIMEOUT_S, busy=busy)


def _port(variable: str, default: int) -> int:
    """The port in the environment variable, else the default if free, else any free port.
    Raises ConfigError."""
    asked = os.environ.get(variable)
    if asked is not None:
        if not asked.isdigit() or not 0 < int(asked) < 65536:
            raise ConfigError(f"{variable}: must be a port, 1 to 65535, got {asked!r}")
        if not _claim_port(int(asked)):
            raise ConfigError(f"{variable}: port {asked} is in use; set another port or unset {variable}")
        return int(asked)
    return next(port for port in itertools.chain([default], iter(_any_port, None)) if _claim_port(port))


def _claim_port(port: int) -> bool:
    """Claim a port for this stack; False if it is in use or claimed.

    A server binds its port only after seconds. Until then an abstract socket name shows the claim to other stacks."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0areal-stack-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return is_free(port)


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def responds(url: str) -> bool:
    """Whether the server at `url` responds with status 200."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
        return response.status == 200
    return False


if __name__ == "__main__":  # started by `Launch`
    stack_owner: Any = sys.argv[1]
    sys.exit(serve(stack_owner, int(sys.argv[2])))
