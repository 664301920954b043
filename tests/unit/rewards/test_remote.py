"""Reward workers of other machines, played by the tests, in the pool of a controller whose own worker is busy."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from aiohttp import ClientWebSocketResponse, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from areal_core.api.refusals import error_middleware
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.config.schema import load
from areal_core.controller.routes import reward_routes
from areal_core.errors import (
    ConfigError,
    GenerationError,
    RewardError,
    RewardTimeoutError,
    RewardWorkerError,
    SessionLostError,
)
from areal_core.launch.process import EXIT_FINAL
from areal_core.models.tokenizer import char_tokenizer
from areal_core.rewards import pool as pools
from areal_core.rewards import remote
from areal_core.rewards.host import Host
from areal_core.rewards.pool import GroupSession, RewardPool
from areal_core.rewards.remote import decode_outcome, decode_work, encode_outcome, encode_work
from areal_core.rewards.worker import GroupMessage
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
    busy = [asyncio.create_task(pool.ask("hang")) for _ in range(9)]
    await asyncio.sleep(0)
    yield pool
    await pool.close()
    await asyncio.gather(*busy, return_exceptions=True)


class Played:
    """A worker of another machine."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket = socket

    async def works(self) -> tuple[int, GroupMessage | None]:
        """Take the next work."""
        return decode_work(await self.socket.receive_bytes(timeout=LIMIT_S))

    async def says(self, group: int, outcome: Any) -> None:
        await self.socket.send_bytes(encode_outcome(group, outcome))

    async def is_given_up(self) -> bool:
        await self.socket.receive(timeout=LIMIT_S)
        return self.socket.closed


Connect = Callable[..., Awaitable[Played]]


@pytest.fixture
async def connect(pool: RewardPool) -> AsyncIterator[Connect]:
    app = web.Application(middlewares=[error_middleware({})])
    app.add_routes(reward_routes(pool))
    async with TestClient(TestServer(app)) as client:

        async def connected(place: int = 1) -> Played:
            return Played(await client.ws_connect(f"/rewards/{place}", max_msg_size=0))

        connected.client = client
        yield connected
        await pool.close()


def begun(pool: RewardPool, answer: str = "") -> GroupSession:
    return pool.begin(Prompt(index=0, prompt_id="", text="", token_ids=(1,), answer=answer), 1)


def deliver(session: GroupSession, body: bytes = b"body") -> None:
    session.deliver([Arrival(0, 0, SampledCompletion(segments=((body, 0),)))])


async def suspended(pool: RewardPool, worker: Played) -> tuple[int, GroupSession]:
    """A group that is suspended in the worker."""
    session = begun(pool)
    deliver(session)
    group, _ = await worker.works()
    await worker.says(group, REQUESTS)
    assert await session.next_outcome() == REQUESTS
    return group, session


async def test_groups_go_on_where_they_were_suspended(pool: RewardPool, connect: Connect) -> None:
    workers = [await connect(), await connect(place=2)]
    suspensions = [await suspended(pool, worker) for worker in workers]
    for group, session in reversed(suspensions):
        deliver(session, b"more")
        assert session.group == group
    for worker, (group, session) in zip(workers, suspensions, strict=True):
        found, arrived = await worker.works()
        assert (found, arrived and arrived.prompt) == (group, None)
        await worker.says(group, REQUESTS)
        assert await session.next_outcome() == REQUESTS
    await pool.close()
    assert [await worker.is_given_up() for worker in workers] == [True, True]


async def test_a_worker_has_many_groups_at_once(pool: RewardPool, connect: Connect) -> None:
    worker = await connect()
    sessions = [begun(pool, answer) for answer in "xyz"]
    for session in sessions:
        deliver(session)
    works = [await worker.works() for _ in sessions]
    assert [arrived.prompt.answer for _, arrived in works if arrived and arrived.prompt] == ["x", "y", "z"]
    for group, _ in reversed(works):
        await worker.says(group, RewardTimeoutError("too long"))
        await worker.says(group, REQUESTS)  # of a group that has ended
    for session in sessions:
        with pytest.raises(RewardTimeoutError, match="too long"):
            await session.next_outcome()
    await suspended(pool, worker)  # it is still there


async def test_a_group_that_is_given_up_is_named(pool: RewardPool, connect: Connect) -> None:
    worker = await connect()
    group, session = await suspended(pool, worker)
    session.close()
    assert await worker.works() == (group, None)


async def test_a_group_that_is_given_up_before_there_is_a_worker_goes_nowhere(connect: Connect) -> None:
    pool = RewardPool(0, timeout_s=1.0, function=len)
    session = begun(pool)
    deliver(session)
    session.close()
    assert pool._waiting == []


async def test_a_lost_connection_loses_groups_and_costs_them_no_try(pool: RewardPool, connect: Connect) -> None:
    """It comes back with another connection, in the same place."""
    worker = await connect()
    _, session = await suspended(pool, worker)
    working = begun(pool)
    deliver(working)
    await worker.works()
    await worker.says(working.group, RewardWorkerError("it died"))
    await worker.socket.close()
    with pytest.raises(RewardWorkerError, match="it died"):
        await working.next_outcome()
    with pytest.raises(SessionLostError, match="has exited"):
        await session.next_outcome()
    await suspended(pool, await connect())


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
    session = begun(pool)
    deliver(session)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SessionLostError, match="has exited"):
            await session.next_outcome()
    assert caplog.messages[-1] == "reward worker 1 disconnected"


PROMPT = Prompt(index=3, prompt_id="ab", text="½ + ½ =\n", token_ids=(5, 6), answer="1")
COMMON, OTHER = b'{"a":\n1}', b"\n\0"
ARRIVALS = [
    Arrival(0, 1, SampledCompletion(segments=((COMMON, 0), (OTHER, 2)), finish_reason="length")),
    Arrival(2, 0, SampledCompletion(segments=((COMMON, 1),))),
]


@pytest.mark.parametrize("prompt", [PROMPT, None], ids=["the first ones", "later ones"])
def test_work(prompt: Prompt | None) -> None:
    arrived = GroupMessage(prompt=prompt, completions=ARRIVALS)
    message = encode_work(9, arrived)
    assert message.count(COMMON) == 1  # two completions have it in common
    group, found = decode_work(message)
    assert (group, found) == (9, arrived)
    assert found is not None
    first, second = found.completions
    assert first.completion.segments[0][0] is second.completion.segments[0][0]


def test_errors_keep_their_kind_where_they_say_something_of_the_group() -> None:
    group, returned = decode_outcome(encode_outcome(7, GenerationError("no body")))
    assert (group, type(returned), str(returned)) == (7, GenerationError, "no body")
    _, returned = decode_outcome(encode_outcome(7, ConfigError("environment: none")))
    assert type(returned) is RewardError  # not another's
    for answer in (b"", b"{}x\n", b'{"scores": 1}\n', b'{"says": "\xff"}\n'):
        group, outcome = decode_outcome(bytes([9]) + bytes(7) + answer)
        assert group == 9
        assert isinstance(outcome, RewardError)
        assert str(outcome).startswith("invalid response of a reward worker: ")


def test_an_outcome_that_can_not_be_sent_costs_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_BYTES", 1000)
    for payload, metrics, says in (
        (bytes(1001), {}, "the scored group has "),
        (b"", {"\ud800": (1.0,)}, "environment: can't serialize its result: "),
        (b"", {"a": (2**70,)}, "environment: can't serialize its result: "),
    ):
        scored = ScoredGroup(payload=payload, summary=replace(summary(), metrics=metrics))
        _, outcome = decode_outcome(encode_outcome(7, scored))
        assert isinstance(outcome, RewardError)
        assert str(outcome).startswith(says)


def run_dir(folder: Path, **config: object) -> RunDir:
    char_tokenizer().save(folder / "tokenizer.json")
    info = RunInfo(run_id="r", model_path=str(folder), checkpoint_url="/store")
    return RunDir.create(load({"state_dir": str(folder), **config}), info)


def test_errors_of_groups_are_told_and_others_are_this_machines(tmp_path: Path) -> None:
    host = Host(run_dir(tmp_path), 1, 1)

    def told(*events: Any) -> list[tuple[int, type]]:
        """What the controller hears of a worker that says `events`, and ends with the last one."""
        receive = Mock(side_effect=[*((4, event) for event in events[:-1]), events[-1]])
        worker: Any = SimpleNamespace(receive=receive, running=5, kill=Mock())
        socket: Any = MagicMock()
        host._send_outcomes(worker, socket)
        assert socket.__exit__.called
        said = [decode_outcome(call.args[0]) for call in socket.send.call_args_list]
        return [(group, type(each)) for group, each in said]

    heard = told(GenerationError("no body"), RewardWorkerError("it died"))
    assert heard == [(4, GenerationError), (5, RewardWorkerError)]
    assert told(ConfigError("no sandbox here any more"), RewardWorkerError("")) == []
    with pytest.raises(ConfigError, match="no sandbox"):
        host._next_event()


def test_a_machine_that_lacks_the_environment_says_so_and_takes_no_work(tmp_path: Path) -> None:
    """It is not started again: it would lack it again."""
    run = run_dir(tmp_path, environment={"name": "elsewhere_alone:Environment"})
    argv = [sys.executable, "-m", "areal_core.rewards.host", "--run-dir", run.root, "--first", "1", "--workers", "2"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == remote_rewards(run, first=1, count=2).final == EXIT_FINAL
    [line] = ended.stderr.splitlines()
    assert line.startswith("areal: error: environment.name: ")
    assert "elsewhere_alone" in line
    assert run.ready_info("rewards", 1) is None
