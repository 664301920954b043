"""One Prefect server, worker and MLflow for all tests here: they take half a minute of CPU to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Up, brought_up

_SETTINGS = {
    "MLFLOW_RUN_ID": "0" * 32,  # of a user's own run, which no run of ours may use
}


@pytest.fixture(scope="package")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with brought_up(tmp_path_factory.mktemp("state"), **_SETTINGS) as stack:
        yield stack
