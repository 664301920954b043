"""What old runs hold, and that a deletion leaves a run whole or gone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError, ProcessError
from areal_core.launch.supervisor import FileLock
from areal_core.run import prune
from areal_core.run.folders import run_folder
from areal_core.run.ownership import Ownership
from areal_core.run.prune import StoredRun, delete, free_leftovers, stored_runs
from areal_core.storage import checkpoint
from areal_core.storage.lease import NAME, Lease, LeaseLostError
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load({"state_dir": str(tmp_path / "state"), "storage": {"url": str(tmp_path / "store"), "lease_s": 1.0}})


def storage(config: RunConfig, run_id: str) -> Storage:
    return Storage.open(config.storage.url, None, 0.0).child(f"runs/{run_id}")


def made(config: RunConfig, run_id: str = "first", steps: tuple[int, ...] = (5, 10)) -> Storage:
    """A run with two launchers behind it, the second of which has made the last checkpoint."""
    store = storage(config, run_id)
    run = RunDir.create(config, RunInfo(run_id=run_id, model_path="m", checkpoint_url=store.url))
    (run.logs / "trainer-0.log").write_bytes(bytes(100))
    (run.weights / "v000010").mkdir()
    (run.weights / "v000010" / "model.safetensors").write_bytes(bytes(1000))
    for number, step in enumerate(steps, 1):
        with Ownership(run, config, store.url, log=print):
            store.put_bytes(f"payloads/{number}/{number:06d}-000001.bin", bytes(10))
            file = run.root / "optimizer"
            file.write_bytes(bytes(500))
            checkpoint.save(store, step, {"optimizer": file}, {}, number=number)
            file.unlink()
    return store


def held(config: RunConfig) -> dict[str, StoredRun]:
    return {run.run_id: run for run in stored_runs(config, pytest.fail)}


def objects(store: Storage) -> list[str]:
    return [name for name in store.list() if name != NAME]


def test_bytes_are_counted_here_and_in_the_store(config: RunConfig, tmp_path: Path) -> None:
    assert held(config) == {}
    assert list(tmp_path.iterdir()) == []  # a look makes nothing
    store, folder = made(config), run_folder(config, "first").root
    run = held(config)["first"]
    assert run.local_bytes == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > 1100
    assert run.stored_bytes == sum(store.sizes().values()) > 1000
    assert run.leftover_bytes == 20  # payloads that no checkpoint names
    assert time.time() - run.changed < 60


def test_states(config: RunConfig) -> None:
    stopped = ("stopped", "deleted", "elsewhere", "cut-short")
    for name in ("finished", "running", "remote", *stopped[:3]):
        made(config, name)
    run_folder(config, "finished").summary.write_text("{}")
    shutil.rmtree(storage(config, "deleted").url)
    shutil.rmtree(run_folder(config, "elsewhere").root)
    for name, ttl_s in (("remote", 30.0), ("stopped", 1.0)):
        Lease(storage(config, name), "another machine", ttl_s=ttl_s).acquire()
    os.utime(Path(storage(config, "stopped").url, NAME), (0, 0))
    storage(config, "cut-short").put_bytes("checkpoints/step-000005.1/optimizer", b"half")
    with FileLock(run_folder(config, "running").launcher_lock, timeout_s=0.0, busy=""):
        found = {name: run.state for name, run in held(config).items()}
    running = {"running": "running", "remote": "running"}
    assert found == running | {"finished": "finished"} | dict.fromkeys(stopped, "stopped")


@pytest.mark.parametrize("absent", ["nothing", "folder", "objects"])
def test_deleted_run_is_gone_but_for_its_lease(config: RunConfig, absent: str) -> None:
    store, other = made(config), made(config, "other")
    if absent != "nothing":
        shutil.rmtree(run_folder(config, "first").root if absent == "folder" else store.url)
    delete(held(config)["first"], config, print)
    assert objects(store) == []
    assert list(held(config)) == ["other"]
    assert not run_folder(config, "first").root.exists()
    assert checkpoint.newest(other) is not None
    made(config)  # under the same name: its launchers have higher numbers
    assert NAME in store.list()


@pytest.mark.parametrize("action", [delete, free_leftovers])
def test_a_run_that_is_running_is_left_alone(config: RunConfig, action: Callable[..., Any]) -> None:
    config = load(config.to_dict() | {"launch": {"stop_timeout_s": 0.1}})
    store = made(config)
    run = held(config)["first"]
    before = objects(store)
    with Ownership(run_folder(config, "first"), config, store.url, log=print), pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_core.run.ownership._OWNER_S", 0.0)
        with pytest.raises(ProcessError, match="first is already running"):
            action(run, config, print)
    assert objects(store) == before
    assert run_folder(config, "first").summary.parent.exists()


def test_leftovers_go_and_what_a_resume_needs_stays(config: RunConfig) -> None:
    store = made(config)
    store.put_bytes("checkpoints/step-000015.2/optimizer", b"cut short")
    newest = checkpoint.newest(store)
    assert held(config)["first"].leftover_bytes == 29
    for after in range(2):
        with pytest.MonkeyPatch.context() as patch:
            Interrupting(patch, after)
            with pytest.raises(Interrupted):
                free_leftovers(held(config)["first"], config, print)
        assert checkpoint.newest(store) == newest
    free_leftovers(held(config)["first"], config, print)
    assert checkpoint.newest(store) == newest
    assert objects(store) == [
        *(f"checkpoints/step-000005.1/{name}" for name in ("manifest.json", "optimizer")),
        *(f"checkpoints/step-000010.2/{name}" for name in ("manifest.json", "optimizer")),
    ]
    assert held(config)["first"].leftover_bytes == 0


class Interrupted(BaseException):
    """The process ends."""


class Interrupting:
    """Ends the deletion after so many of its steps."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        for owner, name in ((Storage, "delete"), (Path, "rename"), (prune.shutil, "rmtree")):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if str(arguments[-1]).startswith((NAME, ".probe-")):
                return call(*arguments, **named)
            if self.left == 0:
                raise Interrupted
            self.left -= 1
            return call(*arguments, **named)

        return counted


@pytest.mark.parametrize("after", range(12))
def test_interrupted_deletion_leaves_a_run_whole_or_gone(config: RunConfig, after: int) -> None:
    store = made(config)
    store.put_bytes("final/README.md", b"card")
    for name in ("manifest.json", "manifest.damaged.json"):  # one that was set aside is gone before the last whole one
        store.put_bytes(f"checkpoints/step-000015.2/{name}", b"{}")
    whole = checkpoint.newest(store)
    with pytest.MonkeyPatch.context() as patch:
        Interrupting(patch, after)
        with pytest.raises(Interrupted):
            delete(held(config)["first"], config, print)
    newest, folder = checkpoint.newest(store), run_folder(config, "first").root
    assert newest in (whole, None)
    assert not folder.exists() or newest == whole  # a folder is never there without its checkpoints
    for run in held(config).values():  # again
        delete(run, config, print)
    assert objects(store) == []
    assert held(config) == {}
    assert list(folder.parent.iterdir()) == []


def test_a_run_that_another_launcher_takes_over_meanwhile_is_left(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Ownership):
        def __enter__(self) -> Ownership:
            store.put_bytes(NAME, b'{"number": %d, "holder": "other", "where": "elsewhere"}' % (self.number + 1))
            return self

    store = made(config)
    before = objects(store)
    run = held(config)["first"]
    monkeypatch.setattr(prune, "Ownership", Lost)
    for action in (free_leftovers, delete):
        with pytest.raises(LeaseLostError):
            action(run, config, print)
    assert objects(store) == before


@pytest.mark.parametrize("where", ["folder", "store"])
@pytest.mark.parametrize("alone", [False, True], ids=["both", "one"])
def test_a_run_that_was_resumed_since_it_was_listed_is_left(config: RunConfig, where: str, alone: bool) -> None:
    store, folder = made(config), run_folder(config, "first").root
    if alone:
        shutil.rmtree(store.url if where == "folder" else folder)
    run = held(config)["first"]
    changed = folder / "summary.json" if where == "folder" else Path(store.url) / "summary.json"
    changed.write_text("{}")
    os.utime(changed, (run.changed + 1, run.changed + 1))
    with pytest.raises(ProcessError, match=r"^run_id: first has changed since it was listed"):
        delete(run, config, print)
    assert changed.exists()


def test_a_store_of_another_place_is_named(config: RunConfig, tmp_path: Path) -> None:
    made(config)
    other = load(config.to_dict() | {"storage": {"url": str(tmp_path / "other")}})
    run = held(other)["first"]
    assert (run.state, run.storage) == ("stopped", None)
    with pytest.raises(
        ConfigError, match=r"^storage\.url: must be .*/store, where run first has its checkpoints, got "
    ):
        delete(run, other, print)
