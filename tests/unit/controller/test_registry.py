"""The life of a server as the picture has it, and updates that hold the servers for no longer than they may."""

import asyncio
from unittest.mock import AsyncMock, MagicMock

import pytest

from areal_core.controller.registry import ServerRegistry
from areal_core.errors import GenerationError
from tests.support.servers import version

WAY = {  # to each state
    "announced": [], "joining": ["join"], "serving": ["join", "serve"], "updating": ["join", "serve", "update"],
    "leaving": ["join", "serve", "leave"], "lost": ["join", "fail"], "ended": ["end"],
}  # fmt: skip


def brought(registry, state, name="a"):
    server = registry.announce(name, MagicMock(url=f"http://{name}"))
    for event in WAY[state]:
        registry.apply(server, event)
    assert server.state.value == state
    return server


@pytest.fixture
def registry():
    return ServerRegistry()


def test_the_next_incarnation_of_a_name_ends_one_that_is_lost_and_nobody_else(registry):
    others = [brought(registry, state, "a") for state in ("announced", "joining", "serving", "updating", "leaving")]
    other_name = brought(registry, "lost", "b")
    lost = brought(registry, "lost", "a")
    new = registry.announce("a", MagicMock())
    assert (lost.state.value, new.state.value) == ("ended", "announced")
    assert registry.servers == (*others, other_name, new)
    assert registry.lost == ("http://b",)


async def test_servers_that_do_not_respond_have_failed_and_a_mistake_of_ours_is_raised(registry):
    servers = [brought(registry, "serving", name) for name in "abc"]

    async def call(server):
        if server.name == "b":
            raise GenerationError("no")
        return server.name

    assert await registry.ask(servers, call) == {servers[0]: "a", servers[2]: "c"}
    assert servers[1].state.value == "lost"

    with pytest.raises(ZeroDivisionError):
        await registry.ask(servers[:1], AsyncMock(side_effect=ZeroDivisionError))
    assert servers[0].at_work


# -- updates -----------------------------------------------------------------------------------------------------------


async def test_an_update_that_a_newer_version_has_overtaken_touches_nobody(registry):
    server = brought(registry, "serving")
    registry.target = version(2)  # of one that has joined while this one waited
    await registry.update(version(1), AsyncMock())
    assert (server.state.value, server.loaded) == ("serving", None)


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_update_that_is_broken_off_leaves_no_server_with_half_of_it(registry, error):
    server = brought(registry, "serving")
    registry.target = version(1)
    with pytest.raises(error):
        await registry.update(version(1), AsyncMock(side_effect=error))
    assert server.state.value == "lost"
    assert not registry.exclusive.locked()
