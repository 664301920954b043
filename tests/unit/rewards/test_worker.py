import asyncio
import os
import re
import select
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival
from areal_core.config.groups import EnvironmentConfig, RolloutConfig
from areal_core.config.schema import RunConfig, load
from areal_core.environments.verdicts import Verdict
from areal_core.errors import (
    ConfigError,
    RewardError,
    RewardTimeoutError,
    RewardWorkerError,
    SessionLostError,
    VerifierError,
)
from areal_core.models.tokenizer import char_tokenizer
from areal_core.rewards import worker
from areal_core.rewards.pool import RewardPool, open_rewards
from areal_core.rewards.worker import judge_in_own_worker, judge_isolated
from areal_core.tracking.timeline import read_timeline
from areal_core.types import Outcome, Prompt
from tests.support import worker_tasks
from tests.support.groups import score_group, served
from tests.support.policies import TOKENIZER, completion
from tests.support.worker_tasks import BUSY_S, GROUPS, CountOpen, native_hang, obey, stop


def arrivals(*completions, request=0):
    return [Arrival(request, index, one) for index, one in enumerate(served(*completions))]


ASKED = Prompt(index=0, prompt_id="0", text="1-1-7=", token_ids=TOKENIZER.encode("1-1-7="), answer="3")


@pytest.fixture
def model(tmp_path):
    char_tokenizer().save(tmp_path / "tokenizer.json")
    return tmp_path


@pytest.mark.parametrize(
    "unfinished", [completion("#3", finish_reason="abort"), completion("", finish_reason="length")]
)
def test_an_unfinished_completion_is_not_scored(model, unfinished):
    with pytest.raises(RewardError, match="a completion is unfinished"):
        score_group(RunConfig(), model, ASKED, served(completion("#3"), unfinished))


@pytest.fixture
async def start():
    """Make a pool; all are closed at the end, and their workers end."""
    pools = []

    def made(workers=1, timeout_s=600.0, function=obey):
        pools.append(RewardPool(workers=workers, timeout_s=timeout_s, function=function))
        return pools[-1]

    yield made
    for pool in pools:
        workers = Watch(pool.pids())
        await pool.close()
        assert workers.all_end()


@pytest.fixture
def group_pool(start, model):
    """Make a pool whose workers run the rollouts of groups."""

    def made(*, workers=1, environment=None, function=worker.Groups, limit_s=30.0):
        config = RunConfig(
            environment=environment or EnvironmentConfig(),
            rollout=RolloutConfig(reward_timeout_s=limit_s),
        )
        return start(workers, limit_s, function(config, str(model)))

    return made


def cpu_s(spans):
    return sum(span.cpu_s or 0.0 for span in spans)


async def test_the_timeline_holds_the_cpu_time_of_every_score(tmp_path):
    pool = RewardPool(
        workers=2, timeout_s=30.0, function=obey, timeline=lambda place: tmp_path / f"rewards-{place}.jsonl"
    )
    await asyncio.gather(*(pool.ask("busy") for _ in range(6)))
    async with asyncio.timeout(30):  # a worker writes a span once it waits again
        while cpu_s(spans := read_timeline(tmp_path)) < 0.8 * 6 * BUSY_S:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await pool.close()
    assert {span.process for span in spans} == {"rewards-0", "rewards-1"}
    assert {span.kind for span in spans} == {"score"}


async def test_a_killed_worker_costs_only_the_job_that_it_held(start):
    pool = start(workers=2)
    jobs = ["die" if i == 3 else "" for i in range(10)]
    results = await asyncio.gather(*(pool.ask(each) for each in jobs), return_exceptions=True)
    assert [type(r) for r in results] == [RewardWorkerError if i == 3 else ScoredGroup for i in range(10)]
    assert "died" in str(results[3])
    assert len(pool.pids()) == 2


async def test_an_idle_worker_that_was_killed_costs_nothing(start):
    pool = start()
    killed = int((await pool.ask("")).payload)
    workers = Watch([killed])
    os.kill(killed, signal.SIGKILL)
    assert workers.all_end()
    assert int((await pool.ask("")).payload) != killed


async def test_a_hanging_verifier_is_given_up_and_its_worker_replaced(start):
    pool = start(timeout_s=0.5)
    workers = Watch(pool.pids())
    with pytest.raises(RewardTimeoutError, match=r"no verdict within 0\.5 s \(rollout\.reward_timeout_s\)") as hung:
        await pool.ask("hang")
    first, where, what = str(hung.value).split("\n")
    assert first.endswith(f"({worker_tasks.__file__}:{obey.__code__.co_firstlineno + 2})"), first
    assert (where.strip().split(", ")[-1], what.strip()) == ("in obey", "time.sleep(600)")
    assert workers.all_end()
    assert int((await pool.ask("")).payload) in pool.pids()


@pytest.fixture
def hasty(monkeypatch):
    """Who can't say where it hangs is not waited for long."""
    monkeypatch.setattr(worker, "_HANG_REPORT_S", 1.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("size", [10, 5_000_000], ids=["what the pipe holds", "more than that"])
async def test_a_stopped_worker_is_replaced_and_costs_no_message(start, size):
    """The limit covers sending: a worker that is stopped takes nothing in."""
    pool = start(timeout_s=0.5, function=len)
    assert await pool.ask("abc") == 3
    [stopped] = pool.pids()
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(30):
        assert await pool.ask("a" * size) == size
    assert pool.pids() != [stopped]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("function", [native_hang, stop])
async def test_a_worker_that_can_not_say_where_it_hangs_is_given_up(start, function):
    pool = start(timeout_s=0.5, function=function)
    before = pool.pids()
    async with asyncio.timeout(30):
        with pytest.raises(RewardTimeoutError, match=r"did not respond within 0\.5 s"):
            await pool.ask("")
    assert pool.pids() != before


async def test_closing_ends_what_is_asked(start):
    pool = start()
    jobs = [asyncio.create_task(pool.ask("hang")) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    for scoring in jobs:
        with pytest.raises(RewardWorkerError):
            await scoring


# Groups of several turns: suspended in a worker while the policy generates.


TALKING = EnvironmentConfig(name="two_turn")


async def test_a_suspended_group_is_lost_with_its_worker_and_others_go_on(group_pool):
    pool = group_pool(environment=TALKING)
    session = pool.begin(ASKED, 1)
    await advance(session, completion("#0"))
    [pid] = pool.pids()
    workers = Watch([pid])
    os.kill(pid, signal.SIGKILL)
    assert workers.all_end()
    with pytest.raises(SessionLostError, match="has exited"):
        await session.next_outcome()
    [request] = await advance(pool.begin(ASKED, 1), completion("#0"))  # it starts again, in another worker
    assert request.calls == ((0, 1),)


async def advance(session, *completions):
    """What the group says next, after the completions of its opening."""
    session.deliver(arrivals(*completions))
    return await session.next_outcome()


async def test_a_group_that_is_given_up_leaves_its_worker(group_pool):
    pool = group_pool(environment=TALKING, function=CountOpen)
    for _ in range(3):
        session = pool.begin(ASKED, 1)
        await advance(session, completion("#0"))
        session.close()
    assert await pool.ask("how many") == 0


# Verifiers and environments that wait.

PATIENT = EnvironmentConfig(verifier=f"{worker_tasks.__name__}:patient")


def told(said):
    return replace(ASKED, answer=said)


async def test_a_worker_awaits_the_verdicts_of_many_groups_at_once(group_pool):
    pool = group_pool(environment=PATIENT)
    sessions = [pool.begin(told("all"), 1) for _ in range(GROUPS)]
    async with asyncio.timeout(30):
        found = await asyncio.gather(*(advance(session, completion("#3")) for session in sessions))
    assert [group.summary.rewards for group in found] == [(1.0,)] * GROUPS


async def test_an_awaited_verdict_that_fails_costs_its_group_alone(group_pool):
    pool = group_pool(environment=PATIENT, limit_s=2.0)
    other = pool.begin(ASKED, 2)
    other.deliver(arrivals(completion("#3")))
    for said, error, shown in (
        ("raise", VerifierError, r"KeyError: '#3' .*worker_tasks\.py:\d+\)\n[^\0]*raise KeyError[^\0]*completion:"),
        ("nan", VerifierError, r"ValueError: a verifier must return a score from 0 to 1, or a Verdict, got nan"),
        ("hang", RewardTimeoutError, r"no verdict within 2 s .*:\d+\)\n[^\0]*asyncio\.sleep\(600\)[^\0]*completion:"),
    ):
        with pytest.raises(error, match=f"^environment.verifier {PATIENT.verifier}: {shown}"):
            await advance(pool.begin(told(said), 2), completion("#3"), completion("#3"))
    other.deliver([Arrival(0, 1, served(completion("3"))[0])])
    assert (await other.next_outcome()).summary.rewards == (1.0, 0.0)


async def test_a_blocking_verifier_costs_its_group_a_try_and_no_other(group_pool):
    pool = group_pool(environment=PATIENT, limit_s=2.0)
    other = pool.begin(ASKED, 2)
    other.deliver(arrivals(completion("#3")))
    said = r"no verdict within 2 s .*\n[^\0]*time\.sleep\(600\)[^\0]*completion:"
    with pytest.raises(RewardTimeoutError, match=said):
        await advance(pool.begin(told("block"), 2), completion("#3"), completion("#3"))
    with pytest.raises(SessionLostError, match="has exited"):
        await other.next_outcome()


async def test_one_await_of_an_environment_has_the_time_limit(group_pool):
    pool = group_pool(environment=EnvironmentConfig(name=f"{worker_tasks.__name__}:Waiting"), limit_s=1.0)
    before = pool.pids()
    said = r"^the environment: no verdict within 1 s .*worker_tasks\.py:\d+\)\n[^\0]*asyncio\.Event\(\)\.wait\(\)"
    with pytest.raises(RewardTimeoutError, match=said):
        await advance(pool.begin(ASKED, 1), completion("#3"))
    assert pool.pids() == before


async def test_an_environment_is_set_up_limited_and_torn_down(model, monkeypatch):
    monkeypatch.setenv("NOTED", str(noted := model / "prepared"))
    config = RunConfig(environment=EnvironmentConfig(name=f"{worker_tasks.__name__}:Prepared"))
    pool = open_rewards(config, str(model), 1)
    scored = await advance(pool.begin(ASKED, 4), *[completion("#3")] * 4)
    assert scored.summary.rewards == (1.0,) * 4
    await pool.close()
    first, *rest, last = noted.read_text().split()
    assert (first, last) == ("setup", "teardown")
    assert set(rest) == {"1", "2"}
    assert len(rest) == 4


class Watch:
    """Processes, held on to by pidfd: one that has ended stays distinguishable from another that got its number."""

    def __init__(self, pids):
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def all_end(self):
        return all(select.select([fd], [], [], 20)[0] for fd in self._fds)


PROMPT = Prompt(index=0, prompt_id="0", text="1+1=", token_ids=(1,), answer="2")
CONFIG = load({"environment": {"verifier": f"{worker_tasks.__name__}:verify"}, "rollout": {"reward_timeout_s": 1.0}})


def outcome(text: str, config: RunConfig = CONFIG) -> Verdict:
    return judge_in_own_worker(config, "", PROMPT, text)


def test_verdicts_are_those_of_the_verifier() -> None:
    assert outcome("print") == Verdict.of(Outcome.CORRECT, "print")
    with pytest.raises(RewardError, match="again"):
        outcome("again")
    assert "asyncio.run() cannot be called from a running event loop" in str(outcome("loop").failure)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("hang", RewardTimeoutError, r"no verdict within 1 s .*worker_tasks.py:\d+\)\n[^\x00]*time.sleep\(60\)"),
        ("die", VerifierError, "it exited its process with status -11"),
    ],
)
def test_answer_that_costs_its_process_is_incorrect(text: str, error: type[RewardError], said: str) -> None:
    with pytest.raises(error, match=f"^environment.verifier {CONFIG.environment.verifier}: {said}"):
        outcome(text)
    verdict = asyncio.run(judge_isolated(CONFIG, "", PROMPT, text))
    assert (verdict.outcome, verdict.score) == (Outcome.TIMED_OUT, 0.0)
    assert f"completion:\n        {text}" in str(verdict.failure)


async def test_module_that_can_not_be_imported_is_named_by_group_judged_apart(group_pool) -> None:
    nowhere = EnvironmentConfig(verifier="nowhere:verify")
    with pytest.raises(ConfigError, match=r"^environment\.verifier: nowhere:verify can't be imported"):
        await advance(group_pool(environment=nowhere).begin(ASKED, 1, apart=True), completion("#3"))


def test_failed_start_of_process_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_START_S", 1e-3)
    with pytest.raises(RewardError, match="did not start") as failed:
        asyncio.run(judge_isolated(CONFIG, "", PROMPT, "1"))
    assert type(failed.value) is RewardError  # the group is tried again; no worker is counted as lost


_LATE = "the environment: its import takes longer than 3 s (/own_module.py:2)"


@pytest.mark.parametrize(
    ("at_import", "apart", "in_group"),
    [
        ("time.sleep(1.5)", "None", None),  # longer than rollout.reward_timeout_s
        ("time.sleep(60)", _LATE, (RewardTimeoutError, re.escape(_LATE))),
        (
            "os._exit(3)",
            "environment.verifier own_module:verify: it exited its process with status 3",
            (RewardWorkerError, "the reward worker died before it could import the user code"),
        ),
    ],
)
async def test_import_of_user_code_has_its_own_time(
    model, monkeypatch: pytest.MonkeyPatch, at_import, apart, in_group
) -> None:
    (model / "own_module.py").write_text(f"import os, time\n{at_import}\ndef verify(*_): return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(model))
    monkeypatch.setattr(worker, "_OPEN_S", 3.0)
    config = replace(CONFIG, environment=EnvironmentConfig(verifier="own_module:verify"))
    verdict = await judge_isolated(config, "", PROMPT, "#2")
    assert str(verdict.failure).split("\n")[0].replace(str(model), "") == apart
    assert verdict.outcome is (Outcome.CORRECT if apart == "None" else Outcome.TIMED_OUT)
    pool = open_rewards(config, str(model), 1)
    with nullcontext() if in_group is None else pytest.raises(in_group[0], match=in_group[1].replace("/", f"{model}/")):
        assert isinstance(await advance(pool.begin(ASKED, 1), completion("#3")), ScoredGroup)
    await pool.close()
