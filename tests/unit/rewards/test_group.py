"""Environments of several turns, as the controller drives them: suspended, resumed, scored."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest

from areal_core.api.wire import Arrival, join_completions
from areal_core.config.schema import load
from areal_core.environments.environment import Verdict, given, sampled, side_by_side
from areal_core.environments.registry import open_environment
from areal_core.errors import RewardError
from areal_core.rewards.group import GroupRollout, _Policy
from areal_core.types import Outcome, Prompt, SampleRequest, Trajectory
from tests.support.groups import served, unpack_group
from tests.support.policies import END, TOKENIZER, completion

PROMPT = Prompt(index=0, prompt_id="0", text="1+1=", token_ids=TOKENIZER.encode("1+1="), answer="2")


def advance_all(environment, *turns, n=2, max_new_tokens=20):
    """The group's requests after each turn, and at last its score. A turn has the completions of one request after the
    other."""
    numbers = itertools.count()
    arrived = [
        [Arrival(number, index, one) for part in turn for number in [next(numbers)] for index, one in enumerate(part)]
        for turn in turns
    ]

    async def main():
        rollout = GroupRollout(environment, PROMPT, n=n, max_new_tokens=max_new_tokens)
        return [await rollout.advance(turn) for turn in arrived]

    return asyncio.run(main())


def trajectory(*segments, reward=1.0):
    return Trajectory(segments=segments, reward=reward, outcome=Outcome.CORRECT if reward == 1.0 else Outcome.INCORRECT)


class Talker:
    """Requests two more completions after each of its first two, all at once, and takes the last of them."""

    async def rollout_group(self, task, policy, n):
        first = [*await policy.sample(task.token_ids), *await policy.sample(task.token_ids)]
        more = await asyncio.gather(
            *(policy.sample([*task.token_ids, *one.token_ids, 5], n=2, max_tokens=4) for one in first)
        )
        return [
            trajectory(given(task.token_ids), sampled(one, trained=False), given([5]), sampled(two))
            for one, (_, two) in zip(first, more, strict=True)
        ]


def test_requests_that_wait_together_go_out_together_and_are_fulfilled_in_order():
    first = served(completion("1", version=1), completion("22", version=1))
    more = [
        served(completion("3", version=2), completion("4", version=2)),
        served(completion("5", version=2), completion("666", version=3)),
    ]
    requests, scored = advance_all(Talker(), [first], more)
    text = PROMPT.token_ids
    assert requests == (
        SampleRequest(token_ids=(*text, *TOKENIZER.encode("1"), END, 5), n=2, max_tokens=4),
        SampleRequest(token_ids=(*text, *TOKENIZER.encode("22"), END, 5), n=2, max_tokens=4),
    )
    payload = unpack_group(scored.payload, scored.summary)
    assert payload.lengths.tolist() == [2 + 1 + 2, 3 + 1 + 4]
    assert payload.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 4 + [True] * 4
    assert payload.versions.tolist() == [1, 1, -1, 2, 2, 1, 1, 1, -1, 3, 3, 3, 3]
    assert payload.tokens.tolist()[2] == 5
    summary = scored.summary
    assert (summary.tokens, summary.unused_tokens) == (2 + 2 + 3 + 4, 2 + 2)
    assert (summary.min_version, summary.max_version, summary.lengths) == (1, 3, (5, 8))


class Judging:
    """A single-turn environment that notes what it has judged, and when it was asked to."""

    def __init__(self, judged):
        self.judged = judged

    async def rollout_group(self, task, policy, n):
        return await side_by_side(self._rollout(task, policy) for _ in range(n))

    async def _rollout(self, task, policy):
        [one] = await policy.sample(task.token_ids)
        self.judged.append(TOKENIZER.decode(one.token_ids.tolist()))
        return trajectory(given(task.token_ids), sampled(one))


def test_a_completion_is_judged_when_it_ends_whatever_the_others_do():
    """Trajectories stay in the order of their indices, in whatever order completions end."""
    judged, seen = [], []
    served_apart = {index: served(completion(str(index + 1)))[0] for index in range(4)}

    async def main():
        rollout = GroupRollout(Judging(judged), PROMPT, n=4, max_new_tokens=20)
        for ended in ([2], [0, 3], [1]):
            outcome = await rollout.advance([Arrival(0, index, served_apart[index]) for index in ended])
            seen.append((list(judged), outcome if outcome == () else "scored"))
        return outcome

    scored = asyncio.run(main())
    assert seen == [(["3"], ()), (["3", "1", "4"], ()), (["3", "1", "4", "2"], "scored")]
    payload = unpack_group(scored.payload, scored.summary)
    assert TOKENIZER.decode(payload.tokens.tolist()) == "1234"
    assert scored.summary.unused_tokens == 0


def test_further_requests_go_out_while_the_first_ones_are_still_generated():
    requests = []

    class Eager(Judging):
        async def _rollout(self, task, policy):
            [first] = await policy.sample(task.token_ids)
            [second] = await policy.sample([*task.token_ids, *first.token_ids])
            return trajectory(given(task.token_ids), sampled(first), given([5]), sampled(second))

    async def main():
        rollout = GroupRollout(Eager([]), PROMPT, n=2, max_new_tokens=20)
        requests.extend(await rollout.advance([Arrival(0, 1, served(completion("7"))[0])]))
        assert await rollout.advance([Arrival(1, 0, served(completion("8"))[0])]) == ()
        requests.extend(await rollout.advance([Arrival(0, 0, served(completion("9"))[0])]))
        return await rollout.advance([Arrival(2, 0, served(completion("6"))[0])])

    scored = asyncio.run(main())
    assert [TOKENIZER.decode(request.token_ids) for request in requests] == ["1+1=7", "1+1=9"]
    payload = unpack_group(scored.payload, scored.summary)
    tokens = np.split(payload.tokens[payload.loss_mask], [4])
    assert [TOKENIZER.decode(each.tolist()) for each in tokens] == ["96", "78"]


def test_a_completion_whose_waiting_was_just_cancelled_can_still_be_had():
    """Its future is cancelled at once, and forgotten a turn of the event loop later."""

    async def main():
        policy = _Policy(PROMPT, 1, 20)
        waiting = asyncio.ensure_future(policy.sample(PROMPT.token_ids))
        await asyncio.sleep(0)
        waiting.cancel()
        [one] = served(completion("1"))
        policy.deliver([Arrival(0, 0, one)], join_completions([one]))
        return await policy._completion(0, 0)

    assert TOKENIZER.decode(asyncio.run(main()).token_ids.tolist()) == "1"


def test_the_failure_of_one_rollout_ends_the_others():
    ended = []

    class Failing(Judging):
        async def _rollout(self, task, policy):
            try:
                [one] = await policy.sample(task.token_ids)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            raise RewardError(f"no result for {TOKENIZER.decode(one.token_ids.tolist())}")

    with pytest.raises(RewardError, match="no result for 1"):
        advance_all(Failing([]), [served(completion("1"))], n=3)
    assert ended == ["cancelled"] * 2


class Broken:
    """Returns what `give` makes of the group's first completions."""

    def __init__(self, give):
        self.give = give

    async def rollout_group(self, task, policy, n):
        return self.give(task, await policy.sample(task.token_ids, n=n))


def whole(task, one, **changes):
    return trajectory(given(task.token_ids), dataclasses.replace(sampled(one), **changes))


def unsampled_end(task, one):
    return whole(task, one, versions=np.array([0] * (len(one.token_ids) - 1) + [-1], np.int32))


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda task, two: [whole(task, two[0])], "must give 2 trajectories, got 1"),
        (lambda task, two: [trajectory(sampled(one)) for one in two], "first segment must be its prompt"),
        (lambda task, two: [trajectory(given(task.token_ids))] * 2, "must hold tokens that the policy sampled"),
        (lambda task, two: [trajectory(given(task.token_ids), given([5]))] * 2, "must hold tokens that the policy"),
        (lambda task, two: [trajectory(given([4 + i]), sampled(two[i])) for i in (0, 1)], "begin with the same prompt"),
        (lambda task, two: [unsampled_end(task, one) for one in two], "must be False where the policy did not sample"),
        (
            lambda task, two: [whole(task, one, versions=one.versions - 1) for one in two],
            "a version older than any that",
        ),
    ],
)
def test_trajectories_that_can_not_be_trained_on_are_refused(give, said):
    with pytest.raises(RewardError, match=said):
        advance_all(Broken(give), [served(completion("1", version=1), completion("2", version=1))])


@pytest.mark.parametrize("asked", [{"max_tokens": 22}, {"max_tokens": 0}, {"n": 0}])
def test_a_request_beyond_the_limit_is_refused(asked):
    class Greedy:
        async def rollout_group(self, task, policy, n):
            assert policy.room(task.token_ids) == 21
            return await policy.sample(task.token_ids, **asked)

    with pytest.raises(RewardError, match=r"there is room for 21 \(task\.max_new_tokens\)"):
        advance_all(Greedy(), [served(completion("1"))], n=1, max_new_tokens=21)


def unsure(task, text):
    """No result for an even digit."""
    return Verdict.of(Outcome.FAILED if text in ("2", "4") else Outcome.CORRECT)


def scored(*texts):
    config = load({"environment": {"verifier": f"{__name__}:unsure"}})
    environment = open_environment(config, TOKENIZER)
    [group] = advance_all(environment, [served(*map(completion, texts))], n=len(texts))
    return group


def test_a_completion_without_result_has_no_reward_and_is_not_trained_on():
    group = scored("1", "22", "2", "3")
    assert group.summary.rewards == (1.0, 1.0, None, 1.0)
    assert (group.summary.outcomes, group.summary.judged) == ({"correct": 3, "failed": 1}, 3)
    payload = unpack_group(group.payload, group.summary)
    trained = np.split(payload.loss_mask, np.cumsum(payload.lengths)[:-1])
    assert [(part.all(), part.any()) for part in trained] == [(True, True), (True, True), (False, False), (True, True)]


def test_a_group_without_a_result_is_tried_again():
    with pytest.raises(RewardError, match="the verifier found no result for any completion of the group"):
        scored("2", "4")


class Paying:
    """Gives every trajectory the same reward; each knows how many trajectories come after it, the last nothing."""

    def __init__(self, reward, number=float):
        self.reward, self.number = reward, number

    async def rollout_group(self, task, policy, n):
        completions = await policy.sample(task.token_ids, n=n)
        paid = [trajectory(given(task.token_ids), sampled(one), reward=self.reward) for one in completions]
        known = [{"mine/later": self.number(later)} if later else {} for later in reversed(range(n))]
        return [dataclasses.replace(one, metrics=metrics) for one, metrics in zip(paid, known, strict=True)]


def test_metrics_of_trajectories_are_kept_by_name():
    [group] = advance_all(Paying(np.int64(1), np.float32), [served(*map(completion, "123"))], n=3)
    assert group.summary.metrics == {"mine/later": (2.0, 1.0)}
    assert [type(reward) for reward in group.summary.rewards] == [float] * 3
    with pytest.raises(RewardError, match="environment: metric mine/later must be a finite number, got 'a lot'"):
        advance_all(Paying(1.0, lambda _: "a lot"), [served(*map(completion, "12"))], n=2)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "a lot", np.float32("nan")])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(RewardError, match="environment: a reward must be a finite number or None, got"):
        advance_all(Paying(reward), [served(completion("1"))], n=1)
