"""Reward workers of other machines, played by the tests, in the pool of a controller whose own worker is busy."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import ClientWebSocketResponse, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from areal_core.api.refusals import refusals
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.config.schema import load
from areal_core.controller.routes import reward_routes
from areal_core.errors import (
    ArealError,
    ConfigError,
    GenerationError,
    RewardError,
    RewardTimeoutError,
    RewardWorkerError,
    SessionLostError,
)
from areal_core.launch.process import SPENT
from areal_core.models.tokenizer import char_tokenizer
from areal_core.rewards import pool as pools
from areal_core.rewards import remote
from areal_core.rewards.host import Host
from areal_core.rewards.pool import GroupSession, RewardPool
from areal_core.rewards.remote import Work, decode_outcome, decode_work, encode_outcome, encode_work
from areal_core.rewards.worker import Arrived
from areal_core.run.roles import remote_rewards
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.types import Prompt, SampleRequest
from tests.support.records import summary

LIMIT_S = 30.0
REQUESTS = (SampleRequest(token_ids=(1,), calls=((0, 0),), max_tokens=1),)


def _hang(_: Any) -> None:
    time.sleep(600)


@pytest.fixture
async def pool() -> AsyncIterator[RewardPool]:
    pool = RewardPool(1, timeout_s=600.0, function=_hang)
    busy = asyncio.create_task(pool.ask("hang"))
    await asyncio.sleep(0)
    yield pool
    await pool.close()
    with suppress(RewardWorkerError):
        await busy


class Played:
    """A worker of another machine."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket = socket

    async def works(self) -> Work:
        """Take the next work."""
        return decode_work(await self.socket.receive_bytes(timeout=LIMIT_S))

    async def answers(self, outcome: Any) -> None:
        await self.socket.send_bytes(encode_outcome(outcome))

    async def is_given_up(self) -> bool:
        await self.socket.receive(timeout=LIMIT_S)
        return self.socket.closed


Connect = Callable[..., Awaitable[Played]]


@pytest.fixture
async def connect(pool: RewardPool) -> AsyncIterator[Connect]:
    app = web.Application(middlewares=[refusals({})])
    app.add_routes(reward_routes(pool))
    async with TestClient(TestServer(app)) as client:

        async def connected(place: int = 1) -> Played:
            return Played(await client.ws_connect(f"/rewards/{place}", max_msg_size=0))

        connected.client = client
        yield connected
        await pool.close()


def begun(pool: RewardPool, answer: str = "") -> GroupSession:
    return pool.begin(Prompt(index=0, prompt_id="", text="", token_ids=(1,), answer=answer), 1)


def advance(session: GroupSession, body: bytes = b"body") -> asyncio.Task[Any]:
    return asyncio.create_task(session.advance([Arrival(0, 0, SampledCompletion(segments=((body, 0),)))]))


async def suspended(pool: RewardPool, worker: Played) -> tuple[GroupSession, asyncio.Task[Any]]:
    """A group that is suspended in the worker, and a second one that it works on."""
    session = begun(pool)
    advancing = advance(session)
    await worker.works()
    await worker.answers(REQUESTS)
    assert await advancing == REQUESTS
    working = advance(begun(pool))
    await worker.works()
    return session, working


async def test_groups_go_on_where_they_were_suspended(pool: RewardPool, connect: Connect) -> None:
    workers = [await connect(), await connect(place=2)]
    sessions = [begun(pool, answer) for answer in "xy"]
    advancing = [advance(session) for session in sessions]
    works = [await worker.works() for worker in workers]
    assert {work.arrived.prompt.answer for work in works if work.arrived.prompt} == {"x", "y"}
    for worker in workers:
        await worker.answers(REQUESTS)
    assert await asyncio.gather(*advancing) == [REQUESTS, REQUESTS]
    going_on = [advance(session, b"more") for session in reversed(sessions)]
    assert [(await worker.works()).arrived.group for worker in workers] == [work.arrived.group for work in works]
    for worker in workers:
        await worker.answers(())
    assert await asyncio.gather(*going_on) == [(), ()]
    await pool.close()
    assert [await worker.is_given_up() for worker in workers] == [True, True]


@pytest.mark.parametrize("waits", [False, True], ids=["suspended", "waits for its worker"])
async def test_a_group_that_is_given_up_is_named_with_the_next_work(
    pool: RewardPool, connect: Connect, waits: bool
) -> None:
    worker = await connect()
    session, working = await suspended(pool, worker)
    if waits:
        waiting = advance(session, b"more")
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    session.close()
    await worker.answers(())
    assert await working == ()
    last = advance(begun(pool))
    assert (await worker.works()).forgotten == [1]
    last.cancel()


async def test_a_lost_connection_loses_groups_and_costs_them_no_try(pool: RewardPool, connect: Connect) -> None:
    """It comes back with another connection, in the same place."""
    worker = await connect()
    session, working = await suspended(pool, worker)
    waiting = advance(session, b"more")
    await asyncio.sleep(0)
    await worker.socket.close()
    with pytest.raises(SessionLostError, match="gone with its machine"):
        await working
    with pytest.raises(SessionLostError, match="suspended"):
        await waiting
    again, worker = advance(session), await connect()
    assert (await worker.works()).arrived.prompt is not None
    await worker.answers(())
    assert await again == ()


async def test_a_worker_that_lost_its_process_gets_no_more_work(pool: RewardPool, connect: Connect) -> None:
    worker = await connect()
    working, waiting = advance(begun(pool)), advance(begun(pool))
    await worker.works()
    await worker.answers(RewardTimeoutError("too long"))
    with pytest.raises(RewardTimeoutError, match="too long"):
        await working
    assert await worker.is_given_up()
    worker = await connect()
    await worker.works()
    await worker.answers(())
    assert await waiting == ()


async def test_what_is_no_worker_takes_no_place(connect: Connect, pool: RewardPool) -> None:
    assert (await connect.client.get("/rewards/1")).status == 400
    await connect()
    await pool.close()
    with pytest.raises(WSServerHandshakeError, match="503"):
        await connect(2)


async def test_a_place_has_one_worker(connect: Connect) -> None:
    first = await connect()
    for place in (0, 1):
        with pytest.raises(WSServerHandshakeError, match="400"):
            await connect(place)
    await first.socket.close()
    await connect()


async def test_a_machine_that_vanishes_is_missed(
    pool: RewardPool, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing there answers pings."""
    monkeypatch.setattr(pools, "SILENT_S", 0.2)
    await connect()
    working = advance(begun(pool))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SessionLostError, match="gone with its machine"):
            await working
    assert caplog.messages[-1] == "reward worker 1 is gone"


async def test_an_answer_that_is_overdue_costs_a_try(
    pool: RewardPool, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    monkeypatch.setattr(pool, "_timeout_s", 0.2)
    worker = await connect()
    working = advance(begun(pool))
    await worker.works()
    with pytest.raises(RewardWorkerError, match="does not answer"):
        await working
    assert await worker.is_given_up()


PROMPT = Prompt(index=3, prompt_id="ab", text="½ + ½ =\n", token_ids=(5, 6), answer="1")
COMMON, OTHER = b'{"a":\n1}', b"\n\0"
ARRIVALS = [
    Arrival(0, 1, SampledCompletion(segments=((COMMON, 0), (OTHER, 2)), finish_reason="length")),
    Arrival(2, 0, SampledCompletion(segments=((COMMON, 1),))),
]


@pytest.mark.parametrize("prompt", [PROMPT, None], ids=["the first ones", "later ones"])
def test_work(prompt: Prompt | None) -> None:
    arrived = Arrived(group=9, prompt=prompt, completions=ARRIVALS)
    message = encode_work([1, 2], arrived)
    assert message.count(COMMON) == 1  # two completions have it in common
    work = decode_work(message)
    assert (work.forgotten, work.arrived) == ([1, 2], arrived)
    first, second = work.arrived.completions
    assert first.completion.segments[0][0] is second.completion.segments[0][0]


def test_errors_keep_their_kind_where_they_say_something_of_the_group() -> None:
    returned = decode_outcome(encode_outcome(GenerationError("no body")))
    assert (type(returned), str(returned)) == (GenerationError, "no body")
    assert type(decode_outcome(encode_outcome(ConfigError("environment: none")))) is RewardError  # not another's
    for answer in (b"", b"{}x\n", b'{"scores": 1}\n', b'{"says": "\xff"}\n'):
        outcome = decode_outcome(answer)
        assert isinstance(outcome, RewardError)
        assert str(outcome).startswith("a reward worker's answer is none: ")


def test_an_outcome_that_can_not_be_sent_costs_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_BYTES", 1000)
    for payload, metrics, says in (
        (bytes(1001), {}, "the group has "),
        (b"", {"\ud800": (1.0,)}, "environment: what it gives can't be sent: "),
        (b"", {"a": (2**70,)}, "environment: what it gives can't be sent: "),
    ):
        scored = ScoredGroup(payload=payload, summary=replace(summary(), metrics=metrics))
        outcome = decode_outcome(encode_outcome(scored))
        assert isinstance(outcome, RewardError)
        assert str(outcome).startswith(says)


def run_dir(folder: Path, **config: object) -> RunDir:
    char_tokenizer().save(folder / "tokenizer.json")
    info = RunInfo(run_id="r", model_path=str(folder), checkpoint_url="/store")
    return RunDir.create(load({"state_dir": str(folder), **config}), info)


def test_errors_of_groups_are_told_and_others_are_this_machines(tmp_path: Path) -> None:
    arrived = Arrived(group=5, prompt=None, completions=[])
    host = Host(run_dir(tmp_path), 1, 1)

    def answer(error: ArealError, *, dies: bool = False) -> type:
        ask = Mock(side_effect=error) if dies else Mock(return_value=error)
        worker: Any = SimpleNamespace(forgotten=[], ask=ask)
        told, lost = host._answer(worker, encode_work([4], arrived))
        assert (worker.forgotten, lost) == ([4], dies)
        return type(decode_outcome(told))

    assert answer(GenerationError("no body")) is GenerationError
    assert answer(RewardWorkerError("it died"), dies=True) is RewardWorkerError
    with pytest.raises(ConfigError, match="no sandbox"):
        answer(ConfigError("no sandbox here any more"))


def test_a_machine_that_lacks_the_environment_says_so_and_takes_no_work(tmp_path: Path) -> None:
    """It is not started again: it would lack it again."""
    run = run_dir(tmp_path, environment={"name": "elsewhere_alone:Environment"})
    argv = [sys.executable, "-m", "areal_core.rewards.host", "--run-dir", run.root, "--first", "1", "--workers", "2"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == remote_rewards(run, first=1, count=2).final == SPENT
    [line] = ended.stderr.splitlines()
    assert line.startswith("areal: error: environment.name: ")
    assert "elsewhere_alone" in line
    assert run.ready_info("rewards", 1) is None
