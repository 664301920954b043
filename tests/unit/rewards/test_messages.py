"""What controller and reward workers of other machines send each other arrives as it was."""

from __future__ import annotations

import pytest

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.config.schema import AlgorithmConfig, EnvironmentConfig, TaskConfig
from areal_core.errors import GenerationError, RewardError, RewardTimeoutError
from areal_core.rewards.messages import BEGIN_ANEW, decode_outcome, decode_work, encode_outcome, encode_work
from areal_core.rewards.worker import Arrived, GroupJob
from areal_core.types import GroupSummary, Outcome, Prompt, SampleRequest

PROMPT = Prompt(index=3, prompt_id="ab", text="½ + ½ =\n", token_ids=(5, 6), answer="1")
JOB = GroupJob(
    prompt=PROMPT, n=2, environment=EnvironmentConfig(), task=TaskConfig(), algorithm=AlgorithmConfig(), model_path=""
)
COMMON, OTHER = b'{"a":\n1}', b"\n\0"
ARRIVALS = [
    Arrival(0, 1, SampledCompletion(segments=((COMMON, 0), (OTHER, 2)), finish_reason="length")),
    Arrival(2, 0, SampledCompletion(segments=((COMMON, 1),))),
]


@pytest.mark.parametrize("job", [JOB, None], ids=["the first ones", "later ones"])
def test_work(job: GroupJob | None) -> None:
    message = encode_work(7, [1, 2], Arrived(group=9, job=job, completions=ARRIVALS))
    assert message.count(COMMON) == 1  # two completions have it in common
    work = decode_work(message)
    assert work is not None
    assert (work.number, work.forgotten, work.group) == (7, [1, 2], 9)
    assert work.prompt == (None if job is None else PROMPT)
    assert work.completions == ARRIVALS
    assert work.completions[0].completion.segments[0][0] is work.completions[1].completion.segments[0][0]


def test_no_work() -> None:
    assert decode_work(BEGIN_ANEW) is None


@pytest.mark.parametrize(
    "outcome",
    [
        (),
        (SampleRequest(token_ids=(1, 2), n=3, max_tokens=4), SampleRequest(token_ids=(), n=1, max_tokens=1)),
        ScoredGroup(
            payload=b"\n\n\0",
            summary=GroupSummary(
                lengths=(1, 2),
                rewards=(0.1 + 0.2, None),
                tokens=3,
                min_version=0,
                max_version=2,
                outcomes={Outcome.RIGHT: 1, Outcome.WRONG: 1},
                truncated=(True, False),
                checksums=(1, 2, 2**32 - 1),
            ),
        ),
    ],
    ids=["nothing", "requests", "scores"],
)
def test_outcomes(outcome: tuple[SampleRequest, ...] | ScoredGroup) -> None:
    assert decode_outcome(encode_outcome(outcome)) == outcome


def test_errors_are_returned_and_those_that_cost_the_worker_are_raised() -> None:
    returned = decode_outcome(encode_outcome(GenerationError("no body")))
    assert (type(returned), str(returned)) == (GenerationError, "no body")
    with pytest.raises(RewardTimeoutError, match="too long"):
        decode_outcome(encode_outcome(RewardTimeoutError("too long"), lost=True))


@pytest.mark.parametrize("answer", [b"", b"{}x\n", b'{"scores": 1}\n'])
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises(RewardError, match="a reward worker's answer is none"):
        decode_outcome(answer)
