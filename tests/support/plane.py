"""A control plane for runs on nodes of an emulated cloud: Prefect's server and MLflow, which take nobody without a
password, on the cloud's control host, and what `make up` starts beside them, the worker of flows."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import boto3
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun

from flows.places import FILES
from flows.shared import PROGRESS
from flows.shares import FINISH
from flows.stack import responds
from tests.emulated_cloud import EmulatedCloud
from tests.support.cloud import MLFLOW_PARAMETER, MLFLOW_SECRET, PARAMETER, SECRET
from tests.support.control import processes_of, run_python
from tests.support.processes import Daemon, wait_for
from tests.support.stack import ControlPlane
from tests.support.terraform import mirror

T = TypeVar("T")
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
SECRETS = {"PREFECT_API_AUTH_STRING": PARAMETER, "MLFLOW_TRACKING_PASSWORD": MLFLOW_PARAMETER}
_START_S = 120.0
_PAGE = 200  # of log lines


class Plane(ControlPlane):
    """What runs on the control host, for a test that is inside of it."""

    def __init__(self, cloud: EmulatedCloud, state: Path, infra: Path) -> None:
        self.cloud = cloud
        self.api = f"http://{cloud.address}:{PREFECT_PORT}/api"
        self.mlflow = f"http://{cloud.address}:{MLFLOW_PORT}"
        settings = cloud.environment | {
            "AREAL_INFRA": str(infra),
            "AREAL_TERRAFORM_PLUGINS": str(mirror()),
            "PREFECT_API_URL": self.api,
            "PREFECT_API_AUTH_STRING": SECRET,
            "PREFECT_HOME": str(state / "prefect"),
            "MLFLOW_TRACKING_URI": self.mlflow,
            "MLFLOW_TRACKING_USERNAME": "admin",
            "MLFLOW_TRACKING_PASSWORD": MLFLOW_SECRET,
        }
        super().__init__(state, SyncPrefectClient(self.api, auth_string=SECRET), settings)

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Prefect's and MLflow's."""
        mlflow = _daemon("mlflow", _mlflow(self.cloud, self.state), self.state, _mlflow_settings(self.state))
        try:
            mlflow.start()
            with prefect_server(self.cloud, self.state):
                wait_for(lambda: responds(f"{self.mlflow}/health"), "MLflow's server", _START_S)
                yield
        finally:
            mlflow.end()

    def up(self) -> None:
        """`make up`: the worker of flows."""
        started = run_python(self.state, "flows.cli", "up", **self.settings)
        assert started.returncode == 0, started.stderr

    def train(self, deployment: str, *overrides: str, **parameters: Any) -> UUID:
        """`prefect deployment run`, with nodes of its own."""
        given = {"provision": "aws", "overrides": [*overrides], **parameters}
        command = ["deployment", "run", deployment]
        for name, value in given.items():
            command += ["--param", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        started = self.prefect(*command)
        assert started.returncode == 0, started.stdout + started.stderr
        (line,) = (line for line in started.stdout.splitlines() if "UUID:" in line)
        return UUID(line.partition("UUID:")[2].strip())

    def run(self, flow_run: UUID) -> FlowRun:
        return self.client.read_flow_run(flow_run)

    def wait(self, flow_run: UUID, *names: str, timeout_s: float = 400.0) -> FlowRun:
        """The flow run, once its state has one of these names."""

        def there() -> FlowRun | None:
            found = self.run(flow_run)
            assert found.state is not None
            return found if found.state.name in names else None

        return self.until(f"the flow run is {' or '.join(names)}", there, flow_run, timeout_s)

    def until(self, what: str, look: Callable[[], T | None], flow_run: UUID, timeout_s: float = 240.0) -> T:
        def there() -> T | None:
            state = self.run(flow_run).state  # before it is looked: it may end in between
            found = look()
            assert found or state is None or not state.is_final(), (
                f"{state.name}: {state.message}\n{self.logs(flow_run)}"
            )
            return found

        return wait_for(there, lambda: f"{what}\n{self.logs(flow_run)}", timeout_s, pause_s=1.0)

    def shares(self, run_id: str) -> dict[str, list[FlowRun]]:
        """Flow runs of nodes, by the names of their shares, the first one first."""
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run_id}"]))
        found: dict[str, list[FlowRun]] = {}
        for run in sorted(self.client.read_flow_runs(flow_run_filter=chosen), key=lambda run: str(run.created)):
            found.setdefault(run.name.removeprefix(f"{run_id} "), []).append(run)
        return found

    def at_work(self, flow_run: UUID, run_id: str, names: set[str]) -> dict[str, FlowRun]:
        """The shares of these names, once nodes that are as they should be have them all."""

        def there() -> dict[str, FlowRun] | None:
            found = {
                name: runs[0]
                for name, runs in self.shares(run_id).items()
                if any(tag.startswith("node:") for tag in runs[0].tags)
            }
            return found if found.keys() == names else None

        return self.until("all nodes have their shares", there, flow_run, 300.0)

    def finish(self, run_id: str) -> None:
        """Have a run end as one whose budget is spent does, for another reason."""
        share = self.shares(run_id)["trainer-0"][-1]
        self.client.update_flow_run(share.id, tags=[*share.tags, f"{FINISH}enough"])

    def step(self, flow_run: UUID) -> int:
        """The step that the page of a run shows; 0 before it has any."""
        shown = self.artifacts(flow_run).get(PROGRESS)
        found = re.match(r"step (\d+)", str(shown and shown.description))
        return int(found[1]) if found else 0

    def queues(self, pool: str) -> list[str]:
        path: Any = f"/work_pools/{pool}/queues/filter"
        return sorted(queue["name"] for queue in self.client.request("POST", path, json={}).json())

    def logs(self, flow_run: UUID) -> str:
        """What a flow run has logged."""
        lines: list[str] = []
        while len(lines) % _PAGE == 0:
            body: Any = {"logs": {"flow_run_id": {"any_": [str(flow_run)]}}, "sort": "TIMESTAMP_ASC"}
            page = self.client.request(
                "POST", "/logs/filter", json=body | {"limit": _PAGE, "offset": len(lines)}
            ).json()
            if not page:
                break
            lines += [line["message"] for line in page]
        return "\n".join(lines)


@contextmanager
def plane_on(cloud: EmulatedCloud, state: Path, infra: Path) -> Iterator[Plane]:
    """The caller is inside of the cloud. `infra/control` was applied in `state`."""
    parameters = boto3.client("ssm", **_client(cloud))
    for name, value in ((PARAMETER, SECRET), (MLFLOW_PARAMETER, MLFLOW_SECRET)):
        parameters.put_parameter(Name=name, Value=value, Type="SecureString", Overwrite=True)
    plane = Plane(cloud, state, infra)
    with contextlib.ExitStack() as servers:
        servers.enter_context(plane.servers())
        plane.up()
        try:
            with plane.client:
                yield plane
        finally:
            down = run_python(state, "flows.cli", "down", **plane.settings)
            assert down.returncode == 0, down.stderr
    wait_for(lambda: not processes_of(state), "the end of what runs on the control host")


def _client(cloud: EmulatedCloud) -> dict[str, Any]:
    names = {"region_name": "AWS_DEFAULT_REGION", "endpoint_url": "AWS_ENDPOINT_URL"}
    names |= {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    return {name: cloud.environment[variable] for name, variable in names.items()}


def _daemon(name: str, command: list[str], state: Path, settings: Mapping[str, str]) -> Daemon:
    """One that runs on the control host."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "AWS_"))}
    return Daemon(state / f"{name}.log", command, {**kept, "DO_NOT_TRACK": "1", **settings}, cwd=FILES)


@contextmanager
def prefect_server(cloud: EmulatedCloud, state: Path, port: int = PREFECT_PORT) -> Iterator[str]:
    """One that takes nobody without the secret; its API."""
    settings = {
        "PREFECT_HOME": str(state / "prefect-server"),
        "PREFECT_SERVER_API_AUTH_STRING": SECRET,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = ["flows.prefect_server", "--host", cloud.address, "--port", str(port)]
    server, api = _daemon("prefect", command, state, settings), f"http://{cloud.address}:{port}/api"
    try:
        server.start()
        wait_for(lambda: responds(f"{api}/health"), f"Prefect's server; its log: {server.log}", _START_S)
        yield api
    finally:
        server.end()


def _mlflow(cloud: EmulatedCloud, state: Path) -> list[str]:
    database, artifacts = f"sqlite:///{state}/mlflow.db", str(state / "mlflow-artifacts")
    return [
        *("mlflow", "server", "--host", cloud.address, "--port", str(MLFLOW_PORT), "--workers", "1"),
        *("--backend-store-uri", database, "--artifacts-destination", artifacts, "--app-name", "basic-auth"),
    ]


def _mlflow_settings(state: Path) -> dict[str, str]:
    users = state / "mlflow.ini"
    users.write_text(
        "[mlflow]\ndefault_permission = READ\nauthorization_function = "
        f"mlflow.server.auth:authenticate_request_basic_auth\ndatabase_uri = sqlite:///{state}/mlflow-users.db\n"
    )
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(users),
        "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
        "MLFLOW_AUTH_ADMIN_PASSWORD": MLFLOW_SECRET,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "emulated",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
