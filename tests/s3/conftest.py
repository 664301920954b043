"""One gateway and one of moto's servers for all tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from areal_core.storage.objects import Storage
from tests.support.needs import skip_without
from tests.support.radosgw import REQUIRE_S3, RadosGateway, missing

_lack = cache(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("s3"):
        skip_without(_lack(), REQUIRE_S3)


@dataclass(frozen=True)
class Place:
    """Where a store may be: a fresh URL, and what it takes to open it."""

    url: str
    endpoint_url: str | None = None

    def open(self) -> Storage:
        return Storage.open(self.url, self.endpoint_url)


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    with RadosGateway(tmp_path_factory.mktemp("radosgw")) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Of the kind that the test is parametrized with."""
    if request.param == "folder":
        return Place(str(tmp_path / "store"))
    if request.param == "moto":
        endpoint_url = request.getfixturevalue("moto")
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    else:
        gateway = request.getfixturevalue("radosgw")
        endpoint_url, keys = gateway.endpoint_url, gateway.credentials
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    return Place(f"s3://areal/{uuid.uuid4().hex}/one", endpoint_url)  # to make a bucket takes the gateway seconds


@pytest.fixture
def store(place: Place) -> Storage:
    return place.open()
