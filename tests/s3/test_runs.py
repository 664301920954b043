"""A whole run whose store is Ceph's gateway, through its outage."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from tests.support.radosgw import RadosGateway
from tests.support.runs import Launched, checked_summary, tiny

pytestmark = pytest.mark.s3
AWAY_S = 15.0  # beyond the moment when the run is seen to wait


def test_a_run_goes_on_once_its_killed_store_is_back(
    radosgw: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in radosgw.credentials.items():
        monkeypatch.setenv(name, value)
    url = f"s3://areal-{uuid.uuid4().hex}/areal"
    config = tiny(
        tmp_path,
        storage={"url": url, "endpoint_url": radosgw.endpoint_url},
        rollout={"batch_size": 16},
        training={"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 1},
        evaluation={"enabled": False},
    )
    with Launched(config, "r") as run:
        run.until_step(1)
        radosgw.kill()
        try:
            run.wait_for("it is told that the run waits", lambda: "retrying for up to 1800 s" in run.output())
            time.sleep(AWAY_S)
        finally:
            radosgw.start()
        assert run.end() == 0, run.output()
        checked_summary(run.run, config)  # every step was made once
        store = Storage.open(f"{url}/runs/r", radosgw.endpoint_url)
        newest = checkpoint.newest(store)
        assert newest is not None
        assert newest.step == config.training.steps
        assert {"model.safetensors", "config.json", "README.md"} <= set(store.child("final").list())
        assert "(storage.patience_s)" in run.output()
        assert "storage: responds again, after" in run.output()
        assert "restart" not in run.output()
