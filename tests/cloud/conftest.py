"""An emulated cloud for all tests of this folder, with what outlives runs, and the nodes of one run on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate

from flows.stack import ROOT
from tests.support.cloud import (
    BUCKET,
    MLFLOW_PARAMETER,
    MLFLOW_SECRET,
    PARAMETER,
    POOL,
    RUN,
    SECRET,
    STATE,
    Cloud,
    emulated,
    free_port,
    until_it_responds,
)
from tests.support.terraform import REGION, REQUIRE_CLOUD, Root, missing

_lack = cache(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip here, not in a fixture: pytest then tells the reason once, not for every test."""
    if lack := _lack():
        if os.environ.get(REQUIRE_CLOUD):
            pytest.fail(f"{lack}; {REQUIRE_CLOUD} is set")
        pytest.skip(lack)


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """With secrets in its parameter store."""
    with emulated(tmp_path_factory.mktemp("moto")) as running:
        for name, value in ((PARAMETER, SECRET), (MLFLOW_PARAMETER, MLFLOW_SECRET)):
            running.client("ssm").put_parameter(Name=name, Value=value, Type="SecureString")
        yield running


@pytest.fixture(scope="session")
def control(cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Root:
    """The root module `control`, applied. Tests leave it there: it ends with the emulated cloud."""
    variables = {
        "region": REGION,
        "zones": [f"{REGION}a", f"{REGION}b"],
        "bucket": BUCKET,
        "image": cloud.image(),
        "secrets": {"prefect": PARAMETER, "mlflow": MLFLOW_PARAMETER},
        "software": {"path": str(ROOT)},
    }
    root = Root(tmp_path_factory.mktemp("control") / "terraform", "control", cloud.endpoint, variables)
    root.apply()
    # The emulated cloud does not look at the condition of a denial, which is that a request is not encrypted.
    cloud.client("s3").delete_bucket_policy(Bucket=BUCKET)
    return root


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    """A server that takes nobody without the secret, and a pool with a queue for the nodes that generate."""
    folder, port = tmp_path_factory.mktemp("prefect"), free_port()
    settings = {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_API_AUTH_STRING": SECRET,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=kept | settings, stdout=output, stderr=output) as server,
    ):
        try:
            until_it_responds(f"http://127.0.0.1:{port}/api/health", log)
            with SyncPrefectClient(f"http://127.0.0.1:{port}/api", auth_string=SECRET) as client:
                client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
                client.request("POST", f"/work_pools/{POOL}/queues", json={"name": f"{RUN}-generation"})
                yield client
        finally:
            server.send_signal(signal.SIGINT)


@pytest.fixture(scope="session")
def nodes(
    cloud: Cloud, control: Root, prefect: SyncPrefectClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Root]:
    """The root module `run`, applied: two spot nodes that generate and one that trains. In the end it is destroyed, and
    nothing may be left."""
    variables = {
        "run": RUN,
        "nodes": {
            "generation": {"count": 2, "gpu": "none", "gpus": 0, "spot": True, "max_price": 0.2},
            "trainer": {"count": 1, "gpu": "none", "gpus": 0},
        },
        "lease": {"owner": "somebody@example.org", "expires_at": "2037-01-31T12:00:00Z"},
        "prefect": {"api_url": str(prefect.api_url), "work_pool": POOL},
        "secrets": {"PREFECT_API_AUTH_STRING": PARAMETER},
        "software": {"path": str(ROOT)},
        "image": cloud.image(),
        "foundation": control.output("foundation"),
    }
    backend = (
        *(f"bucket={BUCKET}", f"key={STATE}", f"region={REGION}"),
        *("use_path_style=true", "skip_credentials_validation=true", "skip_metadata_api_check=true"),
    )
    root = Root(tmp_path_factory.mktemp("run") / "terraform", "run", cloud.endpoint, variables, *backend)
    root.apply()
    yield root
    root.destroy()
    assert cloud.left() == {}
    assert json.loads(cloud.state())["resources"] == []
