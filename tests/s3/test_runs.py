"""Whole runs whose store is Ceph's gateway: from S3 alone after the death of everything, and through its outages."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from areal_core.config.schema import RunConfig
from areal_core.run.launcher import read_summary
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.types import RunSummary
from tests.support.radosgw import RadosGateway
from tests.support.runs import Launched, tiny

pytestmark = [pytest.mark.s3, pytest.mark.slow]
STEPS = 6
AWAY_S = 15.0  # beyond the moment when the run is seen to wait


@pytest.fixture(autouse=True)
def _credentials(radosgw: RadosGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in radosgw.credentials.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url() -> str:
    return f"s3://areal-{uuid.uuid4().hex}/areal"


def configured(state: Path, gateway: RadosGateway, url: str, steps: int = STEPS) -> RunConfig:
    return tiny(
        state,
        storage={"url": url, "endpoint_url": gateway.endpoint_url},
        rollout={"batch_size": 16},
        training={"steps": steps, "checkpoint_every": 2, "keep_checkpoints": 1},
        evaluation={"enabled": False},
    )


def stored(config: RunConfig) -> Storage:
    return Storage.open(f"{config.storage.url}/runs/r", config.storage.endpoint_url)


def ended_in_order(run: Launched) -> RunSummary:
    """Every token is accounted for, and all that the store is to hold is there."""
    assert run.end() == 0, run.output()
    summary = read_summary(run.run)
    assert (summary.steps, summary.reason) == (run.config.training.steps, "steps")
    assert summary.tokens.balanced
    store = stored(run.config)
    newest = checkpoint.newest(store)
    assert newest is not None
    assert newest.step == summary.steps
    assert {"model.safetensors", "config.json", "README.md"} <= set(store.child("final").list())
    return summary


def test_a_run_goes_on_once_its_killed_store_is_back(radosgw: RadosGateway, tmp_path: Path, url: str) -> None:
    with Launched(configured(tmp_path, radosgw, url), "r") as run:
        run.until_step(1)
        radosgw.kill()
        try:
            run.wait_for("it is told that the run waits", lambda: "trying again for up to 1800 s" in run.output())
            time.sleep(AWAY_S)
        finally:
            radosgw.start()
        assert ended_in_order(run).incarnation == 0  # every step was made once
        assert "(storage.patience_s)" in run.output()
        assert "storage: responds again, after" in run.output()
        assert "restart" not in run.output()
