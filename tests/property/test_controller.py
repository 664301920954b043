"""The rollout core under a virtual clock: gate, policies and ledgers hold for any timing, and for a thousand steps.
What takes long comes last: mutants are killed by the first test that fails."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.api.rollouts import trajectory_seed
from areal_core.config.schema import load
from areal_core.controller.core.controller import RolloutController
from areal_core.controller.core.ledger import AdmittedGroup, TrajectoryLedger
from areal_core.environments.source import MixedSource
from areal_core.errors import (
    ConfigError,
    GenerationError,
    RewardError,
    RewardTimeoutError,
    RewardWorkerError,
    RunFinished,
    SessionLostError,
    UserCodeError,
)
from areal_core.types import BatchManifest, GenerationRequest, GroupState, PolicyVersion
from tests.support.rollout import FIRST_TOKEN, FakeEngine, FakePayloads, FakeRewards, Prompts
from tests.support.virtual import run_virtual


class WatchedLedger(TrajectoryLedger):
    """Checks Eq. 3 at every single admission."""

    engine_limit: Callable[[], int]  # set by the harness

    def admit(self, *, version: int) -> AdmittedGroup:
        admitted = super().admit(version=version)
        assert self.admitted <= self.engine_limit(), "the gate let too much in"
        return admitted


def build(
    seed: int,
    *,
    steps: int,
    eta: int,
    policy: str = "admit",
    group: int = 2,
    batch: int = 8,
    interrupts: bool = False,
    right: float = 0.0,
    max_zero_variance: int | None = None,
    more: float = 0.0,
    tasks: dict[str, Any] | None = None,
    **faults: float,
):
    """`max_zero_variance`: sample dynamically, and give up after so many groups in a row."""
    dynamic = (
        {} if max_zero_variance is None else {"dynamic_sampling": True, "max_zero_variance_groups": max_zero_variance}
    )
    config = load(
        {
            "seed": seed,
            "tasks": tasks or {},
            "mode": "async",
            "algorithm": {"group_size": group},
            "rollout": {
                "batch_size": batch,
                "max_staleness": eta,
                "batch_selection": policy,
                "max_tries": 3,
                **dynamic,
            },
            "training": {"steps": steps, "minibatches": 1},
        }
    )
    rng = random.Random(seed)
    capacity = rng.choice([group, 2 * batch, 8 * batch])
    engine = FakeEngine(
        rng,
        capacity=capacity,
        fail=faults.get("generation", 0.0),
        garble=faults.get("garbled", 0.0),
        interrupts=interrupts,
    )
    ledger = WatchedLedger(":memory:", group_size=group)
    ledger.counters.join("engine", "", 0)
    ledger.engine_limit = lambda: (engine.version + eta + 1) * batch
    ledger.publish(PolicyVersion(version=0, path="base", digest="0"))
    ratios = {name: mixed.ratio for name, mixed in config.tasks.items()}
    source = MixedSource(dict.fromkeys(ratios, Prompts()), ratios, seed) if tasks else Prompts()
    controller = RolloutController(
        config=config,
        source=source,
        engine=engine,
        rewards=FakeRewards(rng, n=group, fail=faults.get("reward", 0.0), right=right, more=more),
        payloads=FakePayloads(),
        ledger=ledger,
        stop_token_ids={name: (place,) for place, name in enumerate(config.by_task, 1)},
        opens_with_prompt=dict.fromkeys(config.by_task, True),
    )
    engine.freed = controller.freed.notify
    return config, rng, engine, ledger, controller


async def train(
    controller: RolloutController, rng: random.Random, steps: int, *, linger_s: float = 1.0
) -> list[BatchManifest]:
    """A trainer: pulls, takes its time, publishes."""
    manifests: list[BatchManifest] = []
    async with runs(controller):
        for step in range(1, steps + 1):
            manifest = await controller.batch(step, timeout_s=1000.0)
            assert manifest is not None, f"no batch for step {step}"
            assert await controller.batch(step, timeout_s=20.0) == manifest
            manifests.append(manifest)
            await asyncio.sleep(rng.expovariate(2.0))
            controller.publish(PolicyVersion(version=step, path=f"v{step}", digest=f"{step}"))
        await asyncio.sleep(linger_s)
    return manifests


@asynccontextmanager
async def runs(
    controller: RolloutController, seconds: float = 0.0, reason: str | None = "steps"
) -> AsyncIterator[None]:
    """The controller runs for some seconds, then with the block, and is then told the reason to end, or killed."""
    running = asyncio.ensure_future(controller.run())
    await asyncio.sleep(seconds)
    yield
    if reason is None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    else:
        controller.finish(reason)
        await running


def check_tokens(engine: FakeEngine, ledger: TrajectoryLedger) -> None:
    """What the engine has counted is what the ledger accounts for, to the token."""
    ledger.counters.report("engine", engine.sampled, ledger.tokens().accounted)
    tokens = ledger.tokens()
    assert tokens.generated == engine.sampled
    assert tokens.allowance == 0
    assert tokens.balanced, f"tokens were sampled that the ledger does not know, or counted twice: {tokens}"


def check_ledgers(
    controller: RolloutController, engine: FakeEngine, ledger: TrajectoryLedger, manifests: list[BatchManifest]
) -> None:
    served = [group.group_id for manifest in manifests for group in manifest.groups]
    assert len(served) == len(set(served)), "a group was trained on twice"
    check_tokens(engine, ledger)
    assert controller.rewards.open == 0
    completions = controller.rewards.scored
    scored = [token for _, tokens, _ in completions for token in tokens]
    assert len(set(scored)) == len(scored), "a token is in two completions"
    for prompt, tokens, versions in completions:
        assert versions == [engine.versions[token - FIRST_TOKEN] for token in tokens]
        begun = [place for place, token in enumerate(tokens) if token in engine.contexts]
        assert begun[0] == 0
        assert all(engine.contexts[tokens[place]] == (*prompt, *tokens[:place]) for place in begun)


def test_dynamic_sampling_keeps_groups_whose_rewards_differ_without_a_right_one():
    _, rng, _, ledger, controller = build(5, steps=5, eta=1, right=0.3, max_zero_variance=30)
    controller.rewards.partial = 0.5
    manifests = run_virtual(train(controller, rng, 5))
    served = [summary for manifest in manifests for summary in ledger.summaries(manifest.step)]
    assert {(*summary.rewards, summary.correct) for summary in served} == {(0.5, 1.0, 0)}
    assert set(ledger.dropped()) == {"zero_variance"}


@pytest.mark.parametrize(("right", "mixed", "dropped"), [(0.0, 0, 7), (1.0, 0, 7), (0.0, 4, 3 + 7)])
def test_a_run_that_finds_no_mixed_group_any_more_ends_with_the_reason(right, mixed, dropped):
    """`mixed`: the number of the only one."""
    _, _, _, ledger, controller = build(1, steps=50, eta=1, right=right, max_zero_variance=7)
    rewards, numbers = controller.rewards, itertools.count(1)

    async def score(turns, n):
        scored = await FakeRewards.score(rewards, turns, n)
        other = replace(scored, summary=replace(scored.summary, rewards=(1.0, 0.0)))
        return other if next(numbers) == mixed else scored

    rewards.score = score
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(controller.run())
    said = r"^rollout\.dynamic_sampling: each of the last 7 groups had equal rewards; choose easier"
    assert caught.group_contains(ConfigError, match=said)
    assert ledger.dropped() == {"zero_variance": dropped}
    assert ledger.tokens().dropped > 0


def test_a_run_in_which_every_group_fails_ends_with_the_reason():
    _, _, engine, ledger, controller = build(1, steps=5, eta=1, generation=1.0)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(controller.run())
    assert caught.group_contains(GenerationError, match="the server is gone")
    assert ledger.dropped() == {"generation": 4}
    assert sorted(engine.tries.values(), reverse=True)[:4] == [6, 6, 6, 6]  # three for each of two completions


@pytest.mark.parametrize(
    ("kind", "said", "dropped"),
    [
        (RewardError, "no result, more than 20%", {"reward_failed": 4}),
        (SessionLostError, "no result, more than 20%", {"reward_failed": 4}),  # each group loses one again and again
        (RewardTimeoutError, "3 attempts in a row", {}),
        (RewardWorkerError, "3 attempts in a row", {}),
    ],
)
def test_verifier_that_fails_on_every_group_ends_the_run(kind, said, dropped):
    _, _, _, ledger, controller = build(1, steps=5, eta=1, reward=1.0)
    controller.rewards.failure = kind
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(controller.run())
    assert caught.group_contains(UserCodeError, match=f"^the verifier broke: .*{said}")
    assert ledger.dropped() == dropped
    assert ledger.counts()[GroupState.READY] == 0
    assert ledger.fix_batch(1, controller._selection) is None


def test_a_batch_that_does_not_come_in_time_is_none_and_after_the_end_it_raises():
    _, _, engine, _, controller = build(1, steps=5, eta=1)
    engine.capacity = 0

    async def main() -> None:
        async with runs(controller):
            assert await controller.batch(1, timeout_s=5.0) is None
            controller.finish("score")
            with pytest.raises(RunFinished, match="score"):
                await controller.batch(1, timeout_s=5.0)

    run_virtual(main())


def test_a_restarted_controller_sends_running_groups_again_under_the_same_seeds():
    _, rng, engine, ledger, controller = build(5, steps=5, eta=1)

    async def interrupted() -> None:
        async with runs(controller, 0.3, None):
            pass

    run_virtual(interrupted())
    before = {group.group_id: group.prompt_index for group in ledger.inflight()}
    assert before
    _, rng, engine, _, controller = build(5, steps=5, eta=1)
    controller.ledger = ledger
    ledger.engine_limit = lambda: (engine.version + 2) * 8
    manifests = run_virtual(train(controller, rng, 5))
    consumed = {group.group_id for manifest in manifests for group in manifest.groups}
    assert set(before) <= consumed | {group.group_id for group in ledger.inflight()}
    for group_id, prompt_index in before.items():
        assert engine.seeds[f"group-{group_id}-0"] == trajectory_seed(5, prompt_index, 0)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**40), lives=st.lists(st.floats(0.01, 20.0), min_size=1, max_size=4))
def test_killed_and_resumed_mixture_has_the_prompts_of_an_undisturbed_run(seed, lives):
    ratios = {"a": 1, "b": 2, "c": 3}
    tasks = {name: {"ratio": ratio, "task": {"max_new_tokens": 10 * ratio}} for name, ratio in ratios.items()}
    sent = {}  # stop token and limit, by the seed of the request
    *_, ledger, _ = build(seed, steps=1000, eta=1, tasks=tasks)

    async def live(engine: FakeEngine, controller: RolloutController, seconds: float) -> None:
        serve, ledger.engine_limit, engine.version = engine.serve, lambda: 10**9, ledger.versions.last()

        async def noted(request: GenerationRequest) -> bytes:
            sent.setdefault(request.seed, (*request.stop_token_ids, request.max_tokens))
            return await serve(request)

        async def trained() -> None:
            for step in itertools.count(ledger.versions.last() + 1):
                assert await controller.batch(step, timeout_s=1000.0)
                batch = [controller.source.prompt(index).task for index in ledger.prompt_indices(step)]
                assert [summary.task for summary in ledger.summaries(step)] == batch
                controller.publish(PolicyVersion(version=step, path="", digest=f"{step}"))

        engine.serve = noted
        async with runs(controller, reason=None):
            with suppress(TimeoutError):
                await asyncio.wait_for(trained(), seconds)

    for seconds in (*lives, 20.0):
        _, _, engine, _, controller = build(seed, steps=1000, eta=1, tasks=tasks)
        controller.ledger = ledger
        ledger.resume(1000)
        run_virtual(live(engine, controller, seconds))
    places = [ratios[controller.source.prompt(index).task] for index in range(len(sent))]
    undisturbed = {trajectory_seed(seed, index, 0): (place, 10 * place) for index, place in enumerate(places)}
    first = [each for each in sent.items() if each[0] in undisturbed]  # others were queued again
    assert len(first) > 8
    assert first == [*undisturbed.items()][: len(first)]


def test_groups_in_flight_wait_until_servers_have_the_newest_version_again():
    """It is damaged, and made again: what an older one sampled for them would be too old."""
    _, _, engine, ledger, controller = build(5, steps=5, eta=0)
    ledger.publish(PolicyVersion(version=1, path="v1", digest="1"))
    ledger.engine_limit = lambda: 16
    group = ledger.admit(version=0).group_id
    ledger.versions.mark_damaged(1)
    load = engine.load_version

    async def slowly(version: PolicyVersion) -> None:
        await asyncio.sleep(1.0)
        await load(version)

    engine.load_version = slowly

    async def main() -> None:
        async with runs(controller, 5.0):
            assert controller.running_groups == 0
            controller.publish(PolicyVersion(version=1, path="v1", digest="1"))
            await asyncio.sleep(0.5)
            assert controller.running_groups == 0
            await asyncio.sleep(0.6)
            assert f"group-{group}-0" in engine.seeds

    run_virtual(main())
    assert engine.version == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_an_incarnation_starts_running_groups_again(damaged):
    """Other weights under an old number open one, and a damaged payload of a published step."""
    _, _, engine, ledger, controller = build(11, steps=6, eta=1)

    async def main() -> None:
        async with runs(controller):
            for step in (1, 2):
                manifest = await controller.batch(step, timeout_s=1000.0)
                controller.publish(PolicyVersion(version=step, path=f"v{step}", digest=f"{step}"))
                await asyncio.sleep(0.5)
            flying = {group.group_id for group in ledger.inflight()}
            if damaged:
                controller.drop_damaged(manifest.groups[0].group_id)
            else:
                controller.publish(PolicyVersion(version=1, path="v1", digest="other"))
            await asyncio.sleep(5.0)
            assert ledger.notes.incarnation == 1
            assert engine.version == 1
            assert not flying & {group.group_id for group in ledger.inflight()}
            # Nothing that the replaced weights of version 2 sampled may be left: version 2 does not exist any more.
            assert ledger.fix_batch(2, controller._selection)
            assert {summary.max_version for summary in ledger.summaries(2)} <= {0, 1}
            assert await controller.batch(2, timeout_s=1000.0)

    run_virtual(main())
    assert engine.cut_off > 0
    check_tokens(engine, ledger)


@pytest.mark.parametrize("unreadable", [b"not a response", b"not a response either: abort"])
def test_a_completion_that_can_not_be_read_is_generated_again(unreadable):
    _, rng, engine, ledger, controller = build(2, steps=2, eta=0)
    readable, bodies = engine.serve, [unreadable]

    async def serve(request: GenerationRequest) -> bytes:
        body = await readable(request)
        return bodies.pop() if bodies else body

    engine.serve = serve
    assert len(run_virtual(train(controller, rng, 2))) == 2
    assert not bodies
    assert ledger.dropped() == {}


def test_what_an_environment_leaves_unread_is_lost_to_the_token():
    """It ends with the first completion of a group: what the others have sampled until then is lost."""
    _, rng, engine, ledger, controller = build(6, steps=5, eta=1, right=0.5)
    controller.rewards.early = True
    run_virtual(train(controller, rng, 5))
    check_tokens(engine, ledger)
    assert engine.cut_off > 0
    assert ledger.tokens().dropped > 0


def test_a_group_whose_sessions_are_lost_again_and_again_spends_tries_from_the_third_on():
    """Another failure in between makes two lost ones free again."""
    _, _, _, ledger, controller = build(1, steps=5, eta=0, batch=2)
    lost, broken = SessionLostError("it is gone"), RewardError("it broke")
    failures = [lost, lost, broken, lost, lost, lost, lost]  # the third, the sixth and the seventh cost a try

    async def score(*_):
        raise failures.pop(0)

    controller.rewards.score = score
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(controller.run())
    assert caught.group_contains(SessionLostError, match="it is gone")
    assert failures == []
    assert ledger.dropped() == {"reward_failed": 1}


def test_slow_verifiers_keep_no_server_idle_and_what_they_score_at_the_end_is_in_flight():
    _, _, engine, ledger, controller = build(4, steps=50, eta=5)
    engine.capacity = 8

    async def score(*_):
        await asyncio.sleep(1000.0)
        raise RewardError("the verifier broke")

    controller.rewards.score = score

    async def main() -> None:
        async with runs(controller, 500.0, "minutes"):
            assert ledger.admitted == (0 + 5 + 1) * 8  # all that the gate lets in, not just what the servers can hold

    run_virtual(main())
    assert ledger.tokens().in_flight == engine.sampled > 0


@pytest.mark.parametrize(("capacity", "groups"), [(8, 4), (7, 4), (3, 2), (1, 1), (0, 0)])
def test_servers_get_groups_until_no_place_is_free(capacity, groups):
    _, _, engine, ledger, controller = build(1, steps=5, eta=5, batch=64)
    engine.capacity = capacity

    async def main() -> None:
        async with runs(controller, 0.001):  # a request takes a second
            assert len(ledger.inflight()) == controller.running_groups == groups

    run_virtual(main())


def test_nothing_is_admitted_before_servers_have_lost_replaced_weights():
    _, _, engine, ledger, controller = build(11, steps=6, eta=1)
    loaded, load = asyncio.Event(), engine.load_version

    async def slowly(version: PolicyVersion) -> None:
        if version.digest == "other":
            await loaded.wait()
        await load(version)

    engine.load_version = slowly

    async def main() -> None:
        async with runs(controller):
            assert await controller.batch(1, timeout_s=1000.0)
            controller.publish(PolicyVersion(version=1, path="v1", digest="1"))
            await asyncio.sleep(0.5)
            assert ledger.inflight()
            controller.publish(PolicyVersion(version=1, path="v1", digest="other"))
            await asyncio.sleep(5.0)
            assert (ledger.inflight(), controller.running_groups) == ([], 0)
            loaded.set()
            await asyncio.sleep(0.3)
            assert ledger.inflight()
            assert await controller.batch(2, timeout_s=1000.0)

    run_virtual(main())


def test_seeds_have_63_bits_and_are_the_same_wherever_a_run_goes_on():
    assert trajectory_seed(1, 2, 3) == 1138364116778193076  # b2sum -l 64 of "1/2/3", its bytes reversed, halved
    seeds = {trajectory_seed(run, prompt, requeues) for run in range(8) for prompt in range(8) for requeues in range(8)}
    assert len(seeds) == 512
    assert 2**62 < max(seeds) < 2**63
    assert len({seed % 2 for seed in seeds}) == 2


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    eta=st.integers(0, 5),
    policy=st.sampled_from(["admit", "wait", "drop"]),
    failing=st.booleans(),
    interrupts=st.booleans(),
    more=st.sampled_from([0.0, 0.3]),
    right=st.sampled_from([None, None, 0.03, 0.3, 0.97]),
    early=st.booleans(),
)
def test_any_timing_keeps_the_bound_and_the_ledgers(seed, eta, policy, failing, interrupts, more, right, early):
    """`right`: sample dynamically: batches are filled with mixed groups, and uniform ones dropped, to the token.
    `early`: the run is stopped long before its last step."""
    faults = {"generation": 0.05, "reward": 0.05, "garbled": 0.05} if failing else {}
    if right:
        faults |= {"right": right, "max_zero_variance": 10_000}
    steps = 5 if right else 30
    config, rng, engine, ledger, controller = build(
        seed, steps=1000 if early else steps, eta=eta, policy=policy, interrupts=interrupts, more=more, **faults
    )
    manifests = run_virtual(train(controller, rng, steps, linger_s=0.0 if early else 1.0))
    assert controller.running_groups == 0
    check_ledgers(controller, engine, ledger, manifests)
    assert [len(manifest.groups) for manifest in manifests] == [config.groups_per_batch] * steps
    for manifest in manifests:
        lags = [manifest.step - 1 - summary.min_version for summary in ledger.summaries(manifest.step)]
        assert min(lags) >= 0
        if policy in ("wait", "drop"):
            assert max(lags) <= eta
        if eta == 0 and policy != "admit":
            assert set(lags) == {0}
        assert not right or {summary.correct for summary in ledger.summaries(manifest.step)} == {1}  # of two
    if right:
        dropped, of_uniform = ledger.dropped(), controller.rewards.uniform_tokens
        assert dropped["zero_variance"] > 0
        if not failing and set(dropped) == {"zero_variance"}:
            assert ledger.tokens().dropped == of_uniform
        else:  # groups that no server took have sampled nothing; unreadable responses are dropped too
            assert ledger.tokens().dropped >= of_uniform


@pytest.mark.parametrize(
    ("steps", "interrupts", "fail"), [(100, False, 0.0), pytest.param(1000, True, 0.1, marks=pytest.mark.slow)]
)
def test_a_thousand_steps_under_a_virtual_clock(steps, interrupts, fail):
    config, rng, engine, ledger, controller = build(7, steps=steps, eta=2, interrupts=interrupts, generation=fail)
    manifests = run_virtual(train(controller, rng, steps))
    assert len(manifests) == steps
    assert len(engine.loads) == len(set(engine.loads)) > 4
    check_ledgers(controller, engine, ledger, manifests)
    assert ledger.counts()[GroupState.CONSUMED] == steps * config.groups_per_batch
    mixed = [group.max_version > group.min_version for step in range(1, steps + 1) for group in ledger.summaries(step)]
    assert (engine.interrupted > steps) == (sum(mixed) > steps) == interrupts
