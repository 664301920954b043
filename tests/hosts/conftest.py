"""One network for all tests of this folder, and one state folder, so that the base model is made once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import load
from tests.support.hosts import ADDRESSES, FILES_PORT, HEAD_NODE, REQUIRE_HOSTS, Cluster, Network
from tests.support.namespaces import missing
from tests.support.needs import skip_without
from tests.support.runs import TINY

# Ranks that start again on a busy machine are seconds apart, and every vain wait costs a restart.
COLLECTIVE_TIMEOUT_S = 10.0


_lack = cache(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without(_lack(), REQUIRE_HOSTS)


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def network(state: Path) -> Iterator[Network]:
    with Network(state) as built:
        yield built


@pytest.fixture(scope="session")
def store(network: Network) -> str:
    """URL of an S3 server on the head node."""
    return network.serve_s3()


@pytest.fixture
def cluster(network: Network, store: str, state: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A run of seconds with remote workers on all other machines; its parameter are fields of its configuration."""
    groups: dict[str, dict[str, Any]] = {
        "storage": {"url": "s3://runs/areal", "endpoint_url": store},
        "rollout": {"request_timeout_s": 10.0, "max_tries": 100},  # a machine that is cut off costs many
        "training": {
            "ranks": 2,
            "hosts": 2,
            "steps": 16,
            "collective_timeout_s": COLLECTIVE_TIMEOUT_S,
        },
        "launch": {"remote_roles": "both", "address": ADDRESSES[HEAD_NODE], "files_port": FILES_PORT, "devices": 3},
    }
    own = getattr(request, "param", {})
    names = groups.keys() | own.keys()
    merged = {name: TINY.get(name, {}) | groups.get(name, {}) | own.get(name, {}) for name in names}
    config = load(TINY | {"state_dir": str(state)} | merged)
    with Cluster(network, config, request.function.__name__.removeprefix("test_")) as running:
        yield running
    for host in ADDRESSES:  # one that a failed test has left cut off
        network.join(host)
