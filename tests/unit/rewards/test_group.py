"""Environments, as the controller drives them: suspended, resumed, recorded, scored."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest

from areal_core.api.wire import Arrival
from areal_core.config.schema import load
from areal_core.environments.environment import Environment, SingleTurn, Verdict
from areal_core.environments.registry import open_environment
from areal_core.errors import GenerationError, RewardError, RolloutLimitError
from areal_core.rewards.group import GroupRollout
from areal_core.types import Outcome, Prompt, Return, Rollout, SampleRequest, Trajectory
from tests.support.groups import served, unpack_group
from tests.support.policies import END, TOKENIZER, Scripted, completion

PROMPT = Prompt(index=0, prompt_id="0", text="1+1=", token_ids=TOKENIZER.encode("1+1="), answer="2")


def configured(n=2, max_new_tokens=20, **algorithm):
    """No limit of a prompt but that of the context, which no test here reaches by its prompt alone."""
    task = {"max_new_tokens": max_new_tokens, "max_prompt_tokens": 40}
    return load({"algorithm": {"group_size": n, **algorithm}, "rollout": {"batch_size": 64 * n}, "task": task})


def advance_all(environment, *turns, n=2, **settings):
    """The group's requests after each turn, and at last its score. A turn has the completions of one request after the
    other."""
    numbers = itertools.count()
    arrived = [
        [Arrival(number, index, one) for part in turn for number in [next(numbers)] for index, one in enumerate(part)]
        for turn in turns
    ]

    async def main():
        rollout = GroupRollout(environment, PROMPT, configured(n, **settings))
        return [await advance(rollout, *turn) for turn in arrived]

    return asyncio.run(main())


async def advance(rollout, *arrived):
    """What it says next, after these completions."""
    rollout.deliver(arrived)
    return await rollout.next_outcome()


def rolled(reward=1.0, **fields):
    return Rollout(reward=reward, outcome=Outcome.CORRECT if reward == 1.0 else Outcome.INCORRECT, **fields)


class Own(Environment):
    """Does what its function says."""

    opens_with_prompt = True
    max_turns = 4

    def __init__(self, function):
        self.function = function

    async def rollout(self, task, policy):
        return await self.function(task, policy)


def spelt(trajectories):
    """The segments of sequences as text, those of the policy in capital brackets."""
    return ["".join(_shown(segment) for segment in one.segments) for one in trajectories]


def _shown(segment):
    text = TOKENIZER.decode(segment.token_ids.tolist())
    return text if segment.call < 0 else f"[{text}]" if segment.loss_mask.all() else f"({text})"


async def talk(task, policy):
    """Goes on with its first completion twice at the same time."""
    one = await policy.sample(task.token_ids, trained=False)
    text = [*task.token_ids, *one.token_ids, 5]
    await asyncio.gather(policy.sample(text, max_tokens=4), policy.sample(text, max_tokens=4))
    return rolled()


def test_calls_at_the_same_time_for_the_same_text_are_one_request_and_several_sequences():
    first = served(completion("1", version=1), completion("22", version=1))
    more = [
        served(completion("3", version=2), completion("4", version=2)),
        served(completion("5", version=2), completion("666", version=3)),
    ]
    requests, scored = advance_all(Own(talk), [first], more)
    text = PROMPT.token_ids
    assert requests == (
        SampleRequest(token_ids=(*text, *TOKENIZER.encode("1"), END, 5), calls=((0, 1), (0, 2)), max_tokens=4),
        SampleRequest(token_ids=(*text, *TOKENIZER.encode("22"), END, 5), calls=((1, 1), (1, 2)), max_tokens=4),
    )
    summary, payload = scored.summary, unpack_group(scored.payload, scored.summary)
    # The first call goes on with the sequence, the second begins one that has all of it as its prompt.
    assert (summary.prompts, summary.prompt_of) == ((4, 4 + 2 + 1, 4 + 3 + 1), (0, 1, 0, 2))
    assert (summary.rollout_of, summary.lengths) == ((0, 0, 1, 1), (2 + 1 + 2, 2, 3 + 1 + 2, 4))
    assert payload.loss_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 4 + [True] * 6
    assert payload.versions.tolist() == [1, 1, -1, 2, 2, 2, 2, 1, 1, 1, -1, 2, 2, 3, 3, 3, 3]
    assert summary.loss_tokens == (4, 6)
    assert (summary.tokens, summary.unused_tokens) == (2 + 4 + 3 + 6, 0)
    assert (summary.min_version, summary.max_version) == (1, 3)
    assert summary.metrics == {"rollout/sequences": (2.0, 2.0), "rollout/turns": (3.0, 3.0)}


async def compact(task, policy):
    """A turn, a summary of it, and a new context that begins with the summary."""
    first = await policy.sample(task.token_ids)
    policy.earn(first, 0.5)
    await policy.sample([*task.token_ids, *first.token_ids, 5])
    last = await policy.sample(TOKENIZER.encode("7-"), trained=True)
    policy.earn(last, 2.0)
    one, *others = policy.trajectories()
    return rolled(1.0, trajectories=(dataclasses.replace(one, reward=3.0), *others))


TURNS = [served(completion("1"))], [served(completion("2"))], [served(completion("3"))]


@pytest.mark.parametrize(
    ("algorithm", "returns"),
    [
        ({}, ()),
        ({"credit": "sequence"}, (Return(0, 5, 3.0), Return(1, 2, 1.0))),
        # 0.5, nothing, and 2 with the rollout's 1.
        ({"credit": "turn"}, (Return(0, 2, 3.5), Return(0, 5, 3.0), Return(1, 2, 3.0))),
        ({"credit": "turn", "discount": 0.5}, (Return(0, 2, 1.25), Return(0, 5, 1.5), Return(1, 2, 3.0))),
    ],
)
def test_parts_of_a_rollout_have_returns_by_the_choice_of_credit(algorithm, returns):
    *_, scored = advance_all(Own(compact), *TURNS, n=1, advantage="batch", **algorithm)
    assert scored.summary.returns == returns
    assert scored.summary.prompts == (4, 2)


class Judging(SingleTurn):
    """Notes what it has judged, and when it was asked to."""

    def __init__(self, judged):
        self.judged = judged

    async def rollout(self, task, policy):
        one = await policy.sample(task.token_ids)
        self.judged.append(TOKENIZER.decode(one.token_ids.tolist()))
        return rolled()


def test_a_completion_is_judged_when_it_ends_whatever_the_others_do():
    """Rollouts stay in the order of their indices, in whatever order completions end."""
    judged, seen = [], []
    served_apart = {index: served(completion(str(index + 1)))[0] for index in range(4)}

    async def main():
        rollout = GroupRollout(Judging(judged), PROMPT, configured(4))
        for ended in ([2], [0, 3], [1]):
            rollout.deliver([Arrival(0, index, served_apart[index]) for index in ended])
            await asyncio.sleep(0.01)
            seen.append(list(judged))
        return await rollout.next_outcome()

    scored = asyncio.run(main())
    assert seen == [["3"], ["3", "1", "4"], ["3", "1", "4", "2"]]
    payload = unpack_group(scored.payload, scored.summary)
    assert TOKENIZER.decode(payload.tokens.tolist()) == "1234"
    assert (scored.summary.unused_tokens, scored.summary.metrics) == (0, {})


def test_further_requests_go_out_while_the_first_ones_are_still_generated():
    requests = []

    async def twice(task, policy):
        first = await policy.sample(task.token_ids)
        await policy.sample([*task.token_ids, *first.token_ids, 5])
        return rolled()

    async def main():
        rollout = GroupRollout(Own(twice), PROMPT, configured())
        requests.extend(await advance(rollout, Arrival(0, 1, served(completion("7"))[0])))
        rollout.deliver([Arrival(1, 0, served(completion("8"))[0])])
        requests.extend(await advance(rollout, Arrival(0, 0, served(completion("9"))[0])))
        return await advance(rollout, Arrival(2, 0, served(completion("6"))[0]))

    scored = asyncio.run(main())
    assert [request.calls for request in requests] == [((1, 1),), ((0, 1),)]
    payload = unpack_group(scored.payload, scored.summary)
    tokens = np.split(payload.tokens[payload.loss_mask], [4])
    assert [TOKENIZER.decode(each.tolist()) for each in tokens] == ["96", "78"]


def test_a_request_after_an_await_leaves_while_completions_are_still_to_come():
    async def twice(task, policy):
        first = await policy.sample(task.token_ids)
        await asyncio.sleep(0.01)
        await policy.sample([*task.token_ids, *first.token_ids, 5])

    async def main():
        async with asyncio.timeout(10):
            return await advance(
                GroupRollout(Own(twice), PROMPT, configured()), Arrival(0, 1, served(completion("7"))[0])
            )

    [request] = asyncio.run(main())
    assert request.calls == ((1, 1),)


def test_an_environment_may_begin_with_a_prompt_of_its_own():
    class Asking(Own):
        opens_with_prompt = False

    async def asks(task, policy):
        await policy.sample(TOKENIZER.encode("7+"))
        return rolled()

    [opening], scored = advance_all(Asking(asks), [], [served(completion("1"), completion("2"))])
    assert (opening.token_ids, opening.calls) == (TOKENIZER.encode("7+"), ((0, 0), (1, 0)))
    assert (scored.summary.prompts, scored.summary.rewards) == ((2,), (1.0, 1.0))


async def greedy(task, policy):
    await policy.sample([*task.token_ids, 5])


def test_an_environment_that_says_it_opens_with_the_prompt_has_to():
    with pytest.raises(RewardError, match=r"opens_with_prompt the first turn must sample from task\.token_ids"):
        advance_all(Own(greedy), [served(completion("1"), completion("2"))])


def test_rollouts_that_are_cut_have_no_result_where_they_wait_for_the_policy():
    """The first has ended, the second waits for a completion, the third does something else for ever."""

    async def slow(task, policy):
        one = await policy.sample(task.token_ids)
        said = TOKENIZER.decode(one.token_ids.tolist())
        if said == "2":
            await policy.sample([*task.token_ids, *one.token_ids, 5])
        if said == "3":
            await asyncio.Event().wait()
        return rolled()

    async def main():
        rollout = GroupRollout(Own(slow), PROMPT, configured(3))
        opening = served(completion("1"), completion("2"), completion("3"))
        rollout.deliver([Arrival(0, index, one) for index, one in enumerate(opening)])
        [request] = await rollout.next_outcome()
        assert request.calls == ((1, 1),)
        rollout.cut()
        return await rollout.next_outcome()

    summary = asyncio.run(main()).summary
    assert summary.outcomes == {Outcome.CORRECT: 1, Outcome.CUT: 1, Outcome.TIMED_OUT: 1}
    assert summary.rewards == (1.0, None, 0.0)
    assert (summary.rollout_of, summary.unused_tokens) == ((0, 2), 2)


def test_closing_a_group_that_has_just_begun_frees_its_places():
    class Alone(Own):
        at_once = 1

    async def main():
        environment = Alone(lambda task, policy: policy.sample(task.token_ids))
        given_up = GroupRollout(environment, PROMPT, configured())
        given_up.deliver([])
        given_up.close()
        for _ in range(5):
            await asyncio.sleep(0)
        environment.function = lambda task, policy: asyncio.sleep(0, rolled(None))
        other = GroupRollout(environment, PROMPT, configured())
        other.deliver([])
        async with asyncio.timeout(10):
            await other.next_outcome()

    with pytest.raises(RewardError, match="no result for any completion"):
        asyncio.run(main())


def test_a_setup_that_fails_is_tried_again():
    class Failing(Own):
        tries = 0

        async def setup(self):
            self.tries += 1
            if self.tries == 1:
                raise OSError("no room")

    async def main():
        environment, said = Failing(lambda task, policy: asyncio.sleep(0, rolled(None))), []
        for _ in range(2):
            rollout = GroupRollout(environment, PROMPT, configured())
            rollout.deliver([])
            with pytest.raises(RewardError) as error:
                await rollout.next_outcome()
            said.append(str(error.value).partition("\n")[0])
        return said

    first, second = asyncio.run(main())
    assert "no room" in first
    assert "no result" in second


def test_a_rollout_that_waits_for_its_place_is_cut_as_the_systems(monkeypatch):
    class Alone(Own):
        at_once = 1

    async def main():
        rollout = GroupRollout(Alone(lambda task, policy: asyncio.Event().wait()), PROMPT, configured())
        rollout.deliver([])
        await asyncio.sleep(0.01)
        rollout.cut()
        async with asyncio.timeout(10):
            await asyncio.gather(*rollout._tasks)
        return [task.result().outcome for task in rollout._tasks]

    assert asyncio.run(main()) == [Outcome.TIMED_OUT, Outcome.CUT]


def test_a_group_of_which_all_is_cut_is_generated_again():
    async def main():
        rollout = GroupRollout(Judging([]), PROMPT, configured())
        rollout.deliver([])
        await asyncio.sleep(0.01)  # they call the policy
        rollout.cut()
        return await rollout.next_outcome()

    with pytest.raises(GenerationError, match=r"rollout\.deadline_s: no rollout of the group finished in time"):
        asyncio.run(main())


def test_the_failure_of_one_rollout_ends_the_others():
    ended = []

    async def failing(task, policy):
        try:
            one = await policy.sample(task.token_ids)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise RewardError(f"no result for {TOKENIZER.decode(one.token_ids.tolist())}")

    with pytest.raises(RewardError, match="no result for 1"):
        advance_all(Own(failing), [served(completion("1"))], n=3)
    assert ended == ["cancelled"] * 2


async def endless(task, policy):
    text = list(task.token_ids)
    while True:
        text += [*(await policy.sample(text)).token_ids.tolist(), 5]


def test_a_rollout_that_meets_a_limit_is_incorrect_and_keeps_its_turns():
    """Of four turns each, or of eight tokens after the prompt: two turns of three, and a message of one after each."""
    turns = [[served(completion("11"))]] * 4
    *_, scored = advance_all(Own(endless), *turns, n=1, advantage="batch")
    assert scored.summary.metrics["rollout/turns"] == (4.0,)
    assert (scored.summary.outcomes, scored.summary.truncated, scored.summary.rewards) == (
        {Outcome.OVER_LIMIT: 1}, (False,), (0.0,),
    )  # fmt: skip
    *_, scored = advance_all(Own(endless), *turns[:2], n=1, advantage="batch", max_new_tokens=8)
    assert (scored.summary.outcomes, scored.summary.lengths) == ({Outcome.OVER_LIMIT: 1}, (7,))
    assert scored.summary.truncated == (True,)


def test_an_environment_may_compact_its_context_at_a_limit():
    async def compacting(task, policy):
        text = [*task.token_ids, *(await policy.sample(task.token_ids)).token_ids.tolist(), 5]
        with pytest.raises(RolloutLimitError, match="leave no room"):
            await policy.sample(text)
        await policy.sample(TOKENIZER.encode("7-"))
        return rolled()

    *_, scored = advance_all(
        Own(compacting),
        [served(completion("1111"))],
        [served(completion("2"))],
        n=1,
        advantage="batch",
        max_new_tokens=6,
    )
    assert (scored.summary.prompts, scored.summary.lengths) == ((4, 2), (5, 2))


def test_a_call_that_is_given_up_is_in_no_sequence():
    async def hasty(task, policy):
        calls = [asyncio.ensure_future(policy.sample(task.token_ids)) for _ in range(2)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return rolled()

    async def main():
        rollout = GroupRollout(Own(hasty), PROMPT, configured(1, advantage="batch"))
        [request] = await advance(rollout)
        assert request.calls == ((0, 1),)
        return await advance(rollout, Arrival(0, 0, served(completion("1"))[0]))

    summary = asyncio.run(main()).summary
    assert (summary.lengths, summary.metrics["rollout/turns"]) == ((2,), (1.0,))


def changed(**arrays):
    """What returns the recorded sequences with other arrays in their second segment."""

    def change(policy):
        [one] = policy.trajectories()
        second = dataclasses.replace(one.segments[1], **{name: make(one.segments[1]) for name, make in arrays.items()})
        return (dataclasses.replace(one, segments=(one.segments[0], second)),)

    return change


def part(policy, span):
    return Trajectory(segments=policy.trajectories()[0].segments[span])


def repeated(policy):
    [one] = policy.trajectories()
    return (dataclasses.replace(one, segments=(*one.segments, one.segments[1])),)


def lengthened(policy):
    [one] = policy.trajectories()
    arrays = ("token_ids", "loss_mask", "logprobs", "versions")
    said = dataclasses.replace(
        one.segments[0], **{name: np.resize(getattr(one.segments[0], name), 21) for name in arrays}
    )
    return (dataclasses.replace(one, segments=(*one.segments, said)),)


def swapped(kept=[]):  # noqa: B006 - the sequences of the rollout before
    def give(policy):
        kept.append(policy.trajectories())
        return kept[0]

    return give


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda policy: (), "a rollout with a reward must hold tokens sampled by the policy"),
        (lambda policy: [Trajectory(segments=())], "first segment must be its prompt"),
        (lambda policy: [part(policy, slice(1, None))], "first segment must be its prompt"),
        (lambda policy: [part(policy, slice(1))], "a trajectory must hold tokens sampled by the policy"),
        (changed(loss_mask=lambda its: its.loss_mask[1:]), "loss_mask of a segment must have 2 entries, .* got 1"),
        (changed(call=lambda its: -1), "loss_mask must be False where the policy did not sample"),
        (changed(versions=lambda its: its.versions + 1), "call 0 of this rollout sampled other tokens"),
        (changed(call=lambda its: 7), "call 7 of this rollout sampled other tokens"),
        (repeated, "call 0 is in two segments"),
        (lengthened, r"a trajectory has 4 \+ 23 tokens, more than task\.max_prompt_tokens and"),
        (swapped(), "call 0 of this rollout sampled other tokens"),
    ],
)  # fmt: skip
def test_sequences_that_can_not_be_trained_on_are_refused(give, said):
    async def broken(task, policy):
        await policy.sample(task.token_ids)
        return rolled(trajectories=give(policy))

    with pytest.raises(RewardError, match=f"^environment: .*{said}"):
        advance_all(Own(broken), [served(completion("1", version=1), completion("2", version=1))])


def test_what_is_no_rollout_is_refused():
    async def odd(task, policy):
        await policy.sample(task.token_ids)
        return [1.0]

    with pytest.raises(RewardError, match=r"^environment: rollout must return a Rollout, got list$"):
        advance_all(Own(odd), [served(completion("1"), completion("2"))])


@pytest.mark.parametrize("limit", [22, 0])
def test_a_request_beyond_the_room_is_refused(limit):
    async def much(task, policy):
        assert policy.room(task.token_ids) == 21
        await policy.sample(task.token_ids, max_tokens=limit)

    with pytest.raises(RewardError, match=r"max_tokens must be from 1 to 21 \(task\.max_new_tokens\), got "):
        advance_all(Own(much), [served(completion("1"))], n=1, advantage="batch", max_new_tokens=21)


def test_a_text_goes_on_with_the_longest_sequence_that_it_begins_with():
    answers = {"1": "2", "3": "4", "12=": "5", "12=5;": "6"}
    policy = Scripted({text: [completion(answer)] for text, answer in answers.items()}).policy(PROMPT)

    async def turns():
        for text in answers:
            tokens = [token for part in text for token in TOKENIZER.encode(part)]
            if text.startswith("12"):
                tokens.insert(2, END)
            if text.startswith("12=5"):
                tokens.insert(5, END)
            await policy.sample(tokens)

    asyncio.run(turns())
    assert spelt(policy.trajectories()) == ["1[2]=[5];[6]", "3[4]"]


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
    assert group.summary.loss_tokens == (2, 3, 0, 2)
    payload = unpack_group(group.payload, group.summary)
    trained = np.split(payload.loss_mask, np.cumsum(payload.lengths)[:-1])
    assert [(part.all(), part.any()) for part in trained] == [(True, True), (True, True), (False, False), (True, True)]


def test_a_group_without_a_result_is_tried_again():
    with pytest.raises(RewardError, match="the verifier found no result for any completion of the group"):
        scored("2", "4")


def paying(reward, number=float):
    """Gives every rollout the same reward; each knows how many come after it, the last nothing."""
    later = itertools.count(2, -1)

    async def pay(task, policy):
        left = next(later)
        await policy.sample(task.token_ids)
        return rolled(reward, metrics={"mine/later": number(left)} if left else {})

    own = Own(pay)
    own.max_turns = 1
    return own


def test_metrics_of_rollouts_are_kept_by_name():
    [group] = advance_all(paying(np.int64(1), np.float32), [served(*map(completion, "123"))], n=3)
    assert group.summary.metrics == {"mine/later": (2.0, 1.0)}
    assert [type(reward) for reward in group.summary.rewards] == [float] * 3
    with pytest.raises(RewardError, match="environment: metric mine/later must be a finite number, got 'a lot'"):
        advance_all(paying(1.0, lambda _: "a lot"), [served(*map(completion, "12"))], n=2)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "a lot", np.float32("nan")])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(RewardError, match="environment: a reward must be a finite number or None, got"):
        advance_all(paying(reward), [served(*map(completion, "12"))])
