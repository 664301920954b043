"""The servers that outlive runs: real ones, on a real Postgres, as the control plane's machine starts them."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from flows.control import Control
from flows.places import FILES
from tests.support.cloud import MLFLOW_PARAMETER, MLFLOW_SECRET, PARAMETER, SECRET, Cloud
from tests.support.processes import free_port, wait_for
from tests.support.terraform import CREDENTIALS, REGION

pytestmark = [
    pytest.mark.cloud,
    pytest.mark.skipif(
        not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")), reason="needs Postgres: apt install postgresql"
    ),
]

_TIMEOUT_S = 300.0
# Postgres refuses to run as root: in a user namespace root is somebody else.
_AS_ANOTHER = ["unshare", "--user", "--map-user=1", "--map-group=1"] if os.geteuid() == 0 else []


class Servers:
    """A context: `python -m flows.control`, ready."""

    def __init__(self, folder: Path, cloud: Cloud) -> None:
        self.told = Control(
            address="127.0.0.1",
            state=str(folder / "state"),
            artifacts=f"file://{folder}/artifacts",
            region=REGION,
            prefect_secret=PARAMETER,
            mlflow_secret=MLFLOW_PARAMETER,
            prefect_port=free_port(),
            mlflow_port=free_port(),
        )
        Path(self.told.state).mkdir(exist_ok=True)
        (folder / "control.json").write_bytes(msgspec.json.encode(self.told))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "AWS_"))
        }
        self._log = (folder / "control.log").open("a+")
        self.process = subprocess.Popen(
            [*_AS_ANOTHER, sys.executable, "-m", "flows.control", str(folder / "control.json")],
            cwd=FILES,
            env=kept | CREDENTIALS | {"AWS_ENDPOINT_URL": cloud.endpoint},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Servers:
        begun = self._log.tell()

        def respond() -> bool:
            assert self.process.poll() is None, self.output()
            return "Prefect and MLflow respond." in self.output()[begun:]

        wait_for(respond, self.output, _TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(_TIMEOUT_S) == 0, self.output()
        self._log.close()

    def output(self) -> str:
        return Path(self._log.name).read_text()

    def prefect(self, method: str, path: str, password: str | None, **body: object) -> httpx.Response:
        return self._ask(method, f"http://127.0.0.1:{self.told.prefect_port}/api{path}", password, body)

    def mlflow(self, method: str, path: str, password: str | None, **body: object) -> httpx.Response:
        return self._ask(method, f"http://127.0.0.1:{self.told.mlflow_port}/api/2.0/mlflow{path}", password, body)

    def _ask(self, method: str, url: str, password: str | None, body: object) -> httpx.Response:
        headers = {} if password is None else {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
        return httpx.request(method, url, headers=headers, json=body or None, timeout=60)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a short path: Postgres has a socket in it."""
    with tempfile.TemporaryDirectory(prefix="areal-") as made:
        yield Path(made)


def test_they_take_nobody_without_a_password_and_keep_what_they_know(cloud: Cloud, folder: Path) -> None:
    with Servers(folder, cloud) as servers:
        for password in (None, "admin:wrong-password", "admin:"):
            assert servers.prefect("POST", "/work_pools/filter", password).status_code == 401
            assert servers.mlflow("POST", "/experiments/create", password, name="stolen").status_code == 401
        made = servers.prefect("POST", "/work_pools/", SECRET, name="areal-nodes", type="process")
        assert made.status_code == 201
        assert servers.mlflow("POST", "/experiments/create", f"admin:{MLFLOW_SECRET}", name="areal").status_code == 200
    with Servers(folder, cloud) as again:
        pools = again.prefect("POST", "/work_pools/filter", SECRET).json()
        assert [pool["name"] for pool in pools] == ["areal-nodes"]
        found = again.mlflow("GET", "/experiments/get-by-name?experiment_name=areal", f"admin:{MLFLOW_SECRET}")
        assert found.json()["experiment"]["name"] == "areal"
    for secret in (SECRET, MLFLOW_SECRET):
        told = [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert told == []
