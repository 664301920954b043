"""An emulated cloud for all tests of this folder, with what outlives runs, and the nodes of one run on it.

The tests are on its control host. Machines of instances stand still, but for those of runs that a flow has started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate

from flows.places import FILES
from flows.provision.nodes import Nodes
from tests.emulated_cloud import EmulatedCloud
from tests.emulated_cloud.cloud import missing as emulation_missing
from tests.support.cloud import BUCKET, MLFLOW_PARAMETER, MLFLOW_SECRET, PARAMETER, POOL, RUN, SECRET, Cloud
from tests.support.needs import skip_without
from tests.support.plane import Plane, plane_on, prefect_server
from tests.support.processes import free_port
from tests.support.terraform import (
    CREDENTIALS,
    REGION,
    REQUIRE_CLOUD,
    Root,
    control_state,
    emulated_infra,
    missing,
    terraform_on,
)

_lack = cache(lambda: missing() or emulation_missing())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the files that take longest, and while these wait for terraform, those that do not. A reaper ends what has
    no lease, as the nodes of other files have none: it has a cloud without them."""
    first = ("test_flow.py", "test_leased.py", "test_terraform.py", "test_control.py")
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without(_lack(), REQUIRE_CLOUD)


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCloud]:
    """With secrets in its parameter store."""
    with EmulatedCloud(tmp_path_factory.mktemp("cloud"), power_off_s=10.0) as running, running.inside():
        running.have_boot(False)
        for name, value in ((PARAMETER, SECRET), (MLFLOW_PARAMETER, MLFLOW_SECRET)):
            running.client("ssm").put_parameter(Name=name, Value=value, Type="SecureString")
        yield running


@pytest.fixture(scope="session")
def infra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_infra(tmp_path_factory.mktemp("infra") / "terraform")


@pytest.fixture(scope="session")
def control(cloud: Cloud, infra: Path) -> Root:
    """The root module `control`, applied. Tests leave it there: it ends with the emulated cloud."""
    root = Root(infra / "control", AWS_ENDPOINT_URL=cloud.endpoint, **CREDENTIALS)
    root.init()
    root.apply(
        {
            "region": REGION,
            "zones": [f"{REGION}a", f"{REGION}b"],
            "bucket": BUCKET,
            "image": cloud.image(),
            "secrets": {"prefect": PARAMETER, "mlflow": MLFLOW_PARAMETER},
            "software": {"path": str(FILES)},
        }
    )
    # The emulated cloud does not look at the condition of a denial, which is that a request is not encrypted.
    cloud.client("s3").delete_bucket_policy(Bucket=BUCKET)
    return root


@pytest.fixture(scope="module")
def plane(
    cloud: EmulatedCloud, infra: Path, control: Root, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plane]:
    """What flows are started on; the machines of their nodes run."""
    state = control_state(infra, tmp_path_factory.mktemp("plane"))
    cloud.have_boot(True)
    with plane_on(cloud, state, infra) as running:
        yield running
    cloud.have_boot(False)


@pytest.fixture(scope="session")
def prefect(cloud: EmulatedCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    """A server that takes nobody without the secret, and a pool with a queue for the nodes that generate."""
    folder = tmp_path_factory.mktemp("prefect")
    with prefect_server(cloud, folder, free_port()) as api, SyncPrefectClient(api, auth_string=SECRET) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        client.request("POST", f"/work_pools/{POOL}/queues", json={"name": f"{RUN}-generation"})
        yield client


@pytest.fixture(scope="session")
def nodes(
    cloud: EmulatedCloud,
    infra: Path,
    control: Root,
    prefect: SyncPrefectClient,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Nodes]:
    """Two spot nodes that generate and one that trains. In the end they are ended, and nothing may be left."""
    request = {
        "run": RUN,
        "nodes": {
            "generation": {"count": 2, "gpu": "none", "gpus": 0, "spot": True, "max_price": 0.2},
            "trainer": {"count": 1, "gpu": "none", "gpus": 0},
        },
        "lease": {"owner": "somebody@example.org", "expires_at": "2037-01-31T12:00:00Z"},
        "prefect": {"api_url": str(prefect.api_url), "work_pool": POOL},
        "secrets": {"PREFECT_API_AUTH_STRING": PARAMETER},
        "software": {"path": str(FILES)},
        "image": cloud.image(),
    }
    state = control_state(infra, tmp_path_factory.mktemp("state"))
    with terraform_on(cloud, infra), Nodes(request, state, lock_timeout_s=1) as made:
        made.terraform.apply(made.plan())
        yield made
        made.terraform.apply(made.plan_end())
        assert made.hosts() == []
    assert cloud.left() == {}
    assert json.loads(cloud.state())["resources"] == []
