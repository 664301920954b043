import asyncio

import pytest

from areal_core.config.groups import EnvironmentConfig, TaskConfig
from areal_core.config.schema import AlgorithmConfig, RunConfig
from areal_core.environments.environment import Verdict
from areal_core.environments.registry import exact_match, mathematics, open_environment, open_verifier, verifier_name
from areal_core.errors import ConfigError
from areal_core.models.tokenizer import char_tokenizer
from areal_core.types import Outcome, Prompt, Rollout
from tests.support.policies import END, TOKENIZER, Scripted, completion


def test_a_verifier_is_chosen_by_the_configuration_and_defaults_to_the_tasks_own():
    arithmetic, rows = TaskConfig(name="arithmetic"), TaskConfig(name="rows")
    assert open_verifier(EnvironmentConfig(), arithmetic) is exact_match
    assert open_verifier(EnvironmentConfig(), rows) is mathematics
    assert open_verifier(EnvironmentConfig(verifier="exact_match"), rows) is exact_match
    path = "areal_core.environments.registry:mathematics"
    assert open_verifier(EnvironmentConfig(verifier=path), arithmetic) is mathematics
    with pytest.raises(
        ConfigError,
        match=r"^environment\.verifier: must be set, as task\.name=my_task:Opposites has no default verifier$",
    ):
        verifier_name(EnvironmentConfig(), TaskConfig(name="my_task:Opposites"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "three_turn"}, r"environment\.name: must be one of single_turn, two_turn, .*got .three_turn"),
        ({"verifier": "areal_core.types:nothing"}, r"environment\.verifier: .*types:nothing can't be imported"),
        ({"name": "two_turn", "retry_message": "again!"}, r"environment: the model's tokenizer can't encode 'again!'"),
    ],
)
def test_an_unknown_environment_or_verifier_is_refused_by_field(settings, said):
    with pytest.raises(ConfigError, match=said):
        open_environment(RunConfig(environment=EnvironmentConfig(**settings)), char_tokenizer())


TASK = Prompt(index=0, prompt_id="0", text="1+1=", token_ids=TOKENIZER.encode("1+1="), answer="2")


class Lonely:
    async def rollout_group(self, task: Prompt, policy: object, n: int) -> None: ...


def test_environment_without_rollout_is_refused():
    with pytest.raises(
        ConfigError, match=r"^environment\.name: .*Lonely must be a class derived from Environment .*policy\)`$"
    ):
        open_environment(RunConfig(environment=EnvironmentConfig(name=f"{__name__}:Lonely")), char_tokenizer())


def roll_out(script: Scripted, n: int, limit: int = 100, **settings: object) -> list[Rollout]:
    config = RunConfig(
        environment=EnvironmentConfig(name="two_turn", **settings), algorithm=AlgorithmConfig(reward_incorrect=-1.0)
    )
    environment = open_environment(config, TOKENIZER)
    policies = [script.policy(TASK, max_new_tokens=limit) for _ in range(n)]
    return [policy.finished(asyncio.run(environment.rollout(TASK, policy))) for policy in policies]


def spelled(rollout: Rollout) -> list[tuple[str, bool]]:
    """The segments of its one sequence as text, and whether each is trained on."""
    [trajectory] = rollout.trajectories or ()
    assert all(len(set(segment.loss_mask.tolist())) == 1 for segment in trajectory.segments)
    return [(TOKENIZER.decode(s.token_ids.tolist()), bool(s.loss_mask[0])) for s in trajectory.segments]


def test_only_a_wrong_first_try_is_followed_by_a_second():
    first = [completion("#2", version=3), completion("#7", version=3), completion("#8", version=3)]
    policy = Scripted({"1+1=": first, "1+1=#7=": [completion("#2", version=4)], "1+1=#8=": [completion("#9")]})
    right, mended, wrong = roll_out(policy, 3)
    assert sorted(policy.asked) == ["1+1="] * 3 + ["1+1=#7=", "1+1=#8="]
    assert spelled(right) == [("1+1=", False), ("#2", True)]
    assert spelled(mended) == [("1+1=", False), ("#7", True), ("=", False), ("#2", True)]
    segments = mended.trajectories[0].segments
    assert [s.versions.tolist() for s in segments[1:]] == [[3, 3, 3], [-1], [4, 4, 4]]
    assert segments[1].token_ids[-1] == END
    assert segments[3].logprobs.tolist() == [0, -0.125, -0.25]
    # From -1 for wrong to 1 for right, half of the way for a second try.
    ended = [(one.reward, one.outcome) for one in (right, mended, wrong)]
    assert ended == [(1.0, "correct"), (0.0, "correct"), (-1.0, "incorrect")]


def test_the_policy_is_told_what_the_configuration_says():
    policy = Scripted({"1+1=": [completion("#7")], "1+1=#7;;": [completion("#2")]})
    [trajectory] = roll_out(policy, 1, retry_message=";;", retry_score=0.75)
    assert trajectory.reward == 0.5


def test_the_first_try_stands_without_room_for_a_second():
    """First try 3, message 1 tokens: nothing could follow."""
    [trajectory] = roll_out(Scripted({"1+1=": [completion("#7")]}), 1, limit=4)
    assert spelled(trajectory) == [("1+1=", False), ("#7", True)]
    assert (trajectory.outcome, trajectory.truncated) == ("incorrect", False)


def test_a_second_try_that_is_cut_off_is_wrong():
    cut = completion("#2", finish_reason="length")
    [trajectory] = roll_out(Scripted({"1+1=": [completion("#7")], "1+1=#7=": [cut]}), 1)
    assert (trajectory.reward, trajectory.outcome, trajectory.truncated) == (-1.0, "incorrect", True)


def short(task: Prompt, text: str) -> float:
    return 1 / len(text)


async def polite(task: Prompt, text: str) -> float | Verdict:
    return Verdict.of(Outcome.FAILED) if text == "#9" else 0.5


REWARDS = f"{__name__}:short=-1,{__name__}:polite = 0.5"


@pytest.mark.parametrize(
    ("answer", "reward", "parts"),
    [
        ("#2", 1 - 0.5 + 0.25, {"reward_part/short": 0.5, "reward_part/polite": 0.5}),
        ("#7", -1 - 0.5 + 0.25, {"reward_part/short": 0.5, "reward_part/polite": 0.5}),
        ("#9", None, {}),  # one function has no result
    ],
)
def test_more_reward_functions_add_to_the_reward_and_have_curves(answer, reward, parts):
    config = RunConfig(environment=EnvironmentConfig(rewards=REWARDS), algorithm=AlgorithmConfig(reward_incorrect=-1.0))
    policy = Scripted({"1+1=": [completion(answer)]}).policy(TASK)
    rollout = asyncio.run(open_environment(config, TOKENIZER).rollout(TASK, policy))
    assert (rollout.reward, dict(rollout.metrics)) == (reward, parts)


@pytest.mark.parametrize("rewards", ["own:short", f"{__name__}:short=much", f"{__name__}:short=1,{__name__}:short=2"])
def test_reward_functions_without_a_coefficient_each_are_refused(rewards):
    with pytest.raises(ConfigError, match=r"^environment\.rewards: must be package\.module:name=coefficient"):
        open_environment(RunConfig(environment=EnvironmentConfig(rewards=rewards)), TOKENIZER)
