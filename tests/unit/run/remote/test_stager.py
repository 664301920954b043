"""The stager: one download for all servers of a machine, of what the head node has published and of nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.head import Head
from areal_core.errors import StorageError
from areal_core.run.remote import stager as module
from areal_core.run.remote.stager import Stager
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir, RunInfo
from tests.support.remote import HeadNode


@pytest.fixture
def copy(head_node: HeadNode, tmp_path: Path) -> RunDir:
    """The copy of the run's folder on another machine."""
    config = dataclasses.replace(head_node.config, state_dir=str(tmp_path / "node"))
    return RunDir.create(config, RunInfo(run_id="r", model_path=str(head_node.model), checkpoint_url="/store/r"))


class Fetching:
    """Stands in for a download: counts, and holds each until `go_on` is set."""

    def __init__(self, versions: Path) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.damaged = False
        self._versions = versions

    def __call__(self, source: Head, path: str, file: Path, digest: str, **_: Any) -> None:
        number = path.removeprefix("/versions/").partition("?")[0]
        self.asked.append(number)
        file.write_bytes(weights.weights_file(weights.version_folder(self._versions, int(number))).read_bytes())
        self.go_on.wait()
        if self.damaged:
            raise StorageError(f"{path} is damaged")


@pytest.fixture
def fetching(head_node: HeadNode, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    made = Fetching(head_node.run.weights)
    monkeypatch.setattr(module, "fetch", made)
    return made


@pytest.fixture
def stager(copy: RunDir, fetching: Fetching) -> Iterator[Stager]:
    yield Stager(copy, Head("http://10.0.0.1:1", "token"), "127.0.0.1", kept=2)
    fetching.go_on.set()


def held(copy: RunDir) -> list[str]:
    return sorted(str(path.relative_to(copy.weights)) for path in copy.weights.rglob("*") if path.is_file())


async def test_servers_that_ask_at_once_wait_for_one_download_though_one_gives_up(
    stager: Stager, fetching: Fetching, head_node: HeadNode, copy: RunDir
) -> None:
    made = head_node.publish(3)
    fetching.go_on.clear()
    gives_up, *asking = (asyncio.ensure_future(stager.staged(made)) for _ in range(8))
    while not fetching.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert held(copy) == [f".v3.{made.digest[:16]}"]  # not there before it is whole
    gives_up.cancel()
    fetching.go_on.set()
    found = await asyncio.gather(*asking)
    assert fetching.asked == ["3"]
    [here] = set(found)
    assert here == weights.read_manifest(weights.version_folder(copy.weights, 3))
    assert (here.version, here.digest) == (3, made.digest)
    assert here.path != made.path
    assert weights.is_whole(here)
    assert await stager.staged(made) == here
    assert fetching.asked == ["3"]


async def test_those_that_were_asked_for_last_stay(stager: Stager, head_node: HeadNode, copy: RunDir) -> None:
    made = [head_node.publish(number) for number in range(1, 4)]
    for version in (*made[:2], made[0], made[2]):
        await stager.staged(version)
    assert held(copy) == [f"v00000{n}/{name}" for n in (1, 3) for name in ("manifest.json", "model.safetensors")]


async def test_the_base_model_is_the_machines_own(stager: Stager, fetching: Fetching, head_node: HeadNode) -> None:
    base = weights.base_version(str(head_node.model))
    elsewhere = dataclasses.replace(base, path="/elsewhere")
    assert await stager.staged(elsewhere) == base
    with pytest.raises(StorageError, match=r"^version 0: .* has digest .*, not 0{64}$"):
        await stager.staged(dataclasses.replace(base, digest="0" * 64))
    assert not fetching.asked


async def test_damaged_weights_leave_nothing(
    stager: Stager, fetching: Fetching, head_node: HeadNode, copy: RunDir
) -> None:
    made = head_node.publish(3)
    fetching.damaged = True
    with pytest.raises(StorageError, match="is damaged"):
        await stager.staged(made)
    assert held(copy) == []
    fetching.damaged = False
    assert weights.is_whole(await stager.staged(made))
