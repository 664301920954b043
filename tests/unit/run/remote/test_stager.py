"""The stager: one download for all servers of a machine, of what the head node has published and of nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from areal_core.api import head as module
from areal_core.api.access import authorization
from areal_core.api.head import AwayError, Head
from areal_core.config.schema import LaunchConfig
from areal_core.errors import StorageError
from areal_core.run.remote import stager as stager_module
from areal_core.run.remote.stager import Stager
from areal_core.run.supervision import Supervision
from areal_core.storage import weights
from areal_core.storage.rundir import RunDir, RunInfo
from tests.support.remote import HeadNode

Post = Callable[..., Awaitable[tuple[int, str]]]
Serve = Callable[[Callable[[], web.Application]], str]


@pytest.fixture
def copy(head_node: HeadNode, tmp_path: Path) -> RunDir:
    """The copy of the run's folder on another machine."""
    config = dataclasses.replace(head_node.config, state_dir=str(tmp_path / "node"))
    return RunDir.create(config, RunInfo(run_id="r", model_path=str(head_node.model), checkpoint_url="/store/r"))


class Counting:
    """A head node's files behind a server that counts requests of versions, and holds them until `go_on` is set."""

    def __init__(self, versions: Path) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.most: int | None = None  # bytes that come; the response says all of them
        self._versions = versions

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/versions/{number}", self._version)
        return app

    async def _version(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.match_info["number"])
        await asyncio.to_thread(self.go_on.wait)
        path = weights.version_folder(self._versions, int(request.match_info["number"]))
        data = weights.weights_file(path).read_bytes()
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: self.most])
        if self.most is not None and request.transport is not None:
            request.transport.abort()
        return response


@pytest.fixture
def counting(head_node: HeadNode) -> Counting:
    return Counting(head_node.run.weights)


@pytest.fixture
def stager(copy: RunDir, counting: Counting, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stager]:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(stager_module, "_PATIENCE_S", 0.3)
    made = Stager(copy, Head(serve(counting.app), "token", timeout_s=5.0), "127.0.0.1", kept=2)
    yield made
    counting.go_on.set()


def held(copy: RunDir) -> list[str]:
    return sorted(str(path.relative_to(copy.weights)) for path in copy.weights.rglob("*") if path.is_file())


async def test_servers_that_ask_at_once_wait_for_one_download_though_one_gives_up(
    stager: Stager, counting: Counting, head_node: HeadNode, copy: RunDir
) -> None:
    made = head_node.publish(3)
    counting.go_on.clear()
    gives_up, *asking = (asyncio.ensure_future(stager.staged(made)) for _ in range(8))
    while not counting.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert held(copy) == [f".v3.{made.digest[:16]}"]  # not there before it is whole
    gives_up.cancel()
    counting.go_on.set()
    found = await asyncio.gather(*asking)
    assert counting.asked == ["3"]
    [here] = set(found)
    assert here == weights.read_manifest(weights.version_folder(copy.weights, 3))
    assert (here.version, here.digest) == (3, made.digest)
    assert here.path != made.path
    assert weights.is_whole(here)
    assert await stager.staged(made) == here
    assert counting.asked == ["3"]


async def test_those_that_were_asked_for_last_stay(stager: Stager, head_node: HeadNode, copy: RunDir) -> None:
    made = [head_node.publish(number) for number in range(1, 4)]
    for version in (*made[:2], made[0], made[2]):
        await stager.staged(version)
    assert held(copy) == [f"v00000{n}/{name}" for n in (1, 3) for name in ("manifest.json", "model.safetensors")]


async def test_a_version_that_was_replaced_is_brought_again(
    stager: Stager, counting: Counting, head_node: HeadNode
) -> None:
    before = await stager.staged(head_node.publish(3))
    after = await stager.staged(head_node.publish(3, value=0.5))
    assert before.path == after.path
    assert before.digest != after.digest
    assert weights.is_whole(after)
    assert counting.asked == ["3", "3"]


async def test_the_base_model_is_the_machines_own(stager: Stager, counting: Counting, head_node: HeadNode) -> None:
    base = weights.base_version(str(head_node.model))
    elsewhere = dataclasses.replace(base, path="/elsewhere")
    assert await stager.staged(elsewhere) == base
    with pytest.raises(StorageError, match=r"^version 0: .* has digest .*, not 0{64}$"):
        await stager.staged(dataclasses.replace(base, digest="0" * 64))
    assert not counting.asked


async def test_damaged_weights_are_refused_and_leave_nothing(
    stager: Stager, counting: Counting, head_node: HeadNode, copy: RunDir
) -> None:
    made = head_node.publish(3)
    with pytest.raises(StorageError, match=rf"is damaged: its digest is {made.digest}, must be 0{{64}}$"):
        await stager.staged(dataclasses.replace(made, digest="0" * 64))
    counting.most = 100
    with pytest.raises(AwayError, match=r"^/versions/3\S* is cut short, 100 of \d+ bytes: "):
        await stager.staged(made)
    assert held(copy) == []
    counting.most = None
    assert weights.is_whole(await stager.staged(made))


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(copy: RunDir) -> Supervision:
    return Supervision(copy, LaunchConfig(), log=print, forward=print, end=lambda: None)


@pytest.fixture
async def asked(stager: Stager, beside: Supervision) -> AsyncIterator[Post]:
    """POST to a path of the stager at work; returns status and body."""
    with stager.running(beside) as url:
        async with aiohttp.ClientSession() as session:

            async def post(body: object, token: str | None = "token", path: str = "/stage") -> tuple[int, str]:
                headers = authorization(token)
                sent = {"data": body} if isinstance(body, bytes) else {"json": body}
                async with session.post(f"{url}{path}", headers=headers, **sent) as response:
                    return response.status, await response.text()

            yield post
    assert beside.failure is None
    assert not [thread for thread in threading.enumerate() if thread.name == "stager"]


async def test_its_route(asked: Post, counting: Counting, head_node: HeadNode, copy: RunDir) -> None:
    made, here = dataclasses.asdict(head_node.publish(3)), weights.version_folder(copy.weights, 3)
    assert await asked(made) == (200, f'{{"path": "{here}"}}')
    for token, path in ((None, "/stage"), ("another", "/stage"), (None, "/nowhere")):
        assert (await asked(made, token, path))[0] == 401
    refused = [
        (made | {"version": 77}, 502),
        (made | {"digest": "x"}, 400),
        ({}, 400),
        ([], 400),
        (b"[" * 200_000, 400),
    ]
    for body, status in refused:
        got, text = await asked(body)
        assert (got, len(text.splitlines())) == (status, 1), text
