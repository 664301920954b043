"""What reward workers do in their tests. A worker imports this module alone: that of the tests takes as long as all
else that it imports, in the time of a verdict."""

import asyncio
import ctypes
import os
import signal
import time
from typing import Any

from areal_core.api.scored_groups import ScoredGroup
from areal_core.environments.environment import SingleTurn
from areal_core.environments.verdicts import Verdict
from areal_core.errors import RewardError
from areal_core.rewards import worker
from areal_core.types import Outcome, Prompt, Rollout
from tests.support.records import summary

BUSY_S = 0.05  # CPU seconds of a job that does nothing else
SUMMARY = summary()


def obey(said):
    if said == "hang":
        time.sleep(600)
    if said == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if said == "busy":
        end_s = time.process_time() + BUSY_S
        while time.process_time() < end_s:
            pass
    return ScoredGroup(payload=str(os.getpid()).encode(), summary=SUMMARY)


def native_hang(_):
    """Python hears of no signal, as in native code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)


def stop(_):
    os.kill(os.getpid(), signal.SIGSTOP)


class CountOpen(worker.Groups):
    def __call__(self, message):
        loop: Any = asyncio.get_running_loop()
        return len(loop._open) if message == "how many" else worker.Groups.__call__(self, message)


INSIDE = []  # in a worker: whose verdicts are awaited
GROUPS = 50


async def patient(task, text):
    """Does what the task says; "all": ends once the verdicts of all groups are awaited at the same moment."""
    INSIDE.append(task)
    if task.answer == "block":
        time.sleep(600)  # noqa: ASYNC251
    if task.answer == "raise":
        raise KeyError(text)
    if task.answer == "hang":
        await asyncio.sleep(600)
    while task.answer == "all" and len(INSIDE) < GROUPS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return float("nan" if task.answer == "nan" else len(text) > 1)


class Waiting(SingleTurn):
    """Takes many short waits, then a long one."""

    async def rollout(self, task, policy):
        await policy.sample(task.token_ids)
        for _ in range(15):
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()


class Prepared(SingleTurn):
    """Writes down what happens to it; two rollouts meet, and a third never comes between."""

    at_once = 2
    inside = 0

    def note(self, what):
        with open(os.environ["NOTED"], "a") as file:
            file.write(f"{what}\n")

    async def setup(self):
        await asyncio.sleep(0.01)
        self.note("setup")

    async def teardown(self):
        self.note("teardown")

    async def rollout(self, task, policy):
        self.inside += 1
        self.note(self.inside)
        await policy.sample(task.token_ids)
        await asyncio.sleep(0.01)
        self.inside -= 1
        return Rollout(reward=1.0, outcome=Outcome.CORRECT)


def verify(task: Prompt, text: str) -> Verdict:
    if text == "hang":
        time.sleep(60)
    if text == "die":
        ctypes.string_at(0)
    if text == "again":
        raise RewardError("again")
    if text == "print":
        print("no outcome")
    if text == "loop":
        asyncio.run(asyncio.sleep(0))
    return Verdict.of(Outcome.CORRECT, text)
