"""What controller and reward workers of other machines send each other arrives as it was."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival, SampledCompletion
from areal_core.errors import ConfigError, GenerationError, RewardError, RewardTimeoutError
from areal_core.rewards import messages
from areal_core.rewards.messages import decode_outcome, decode_work, encode_outcome, encode_work
from areal_core.rewards.worker import Arrived
from areal_core.types import GroupSummary, Outcome, Prompt, SampleRequest

PROMPT = Prompt(index=3, prompt_id="ab", text="½ + ½ =\n", token_ids=(5, 6), answer="1")
COMMON, OTHER = b'{"a":\n1}', b"\n\0"
ARRIVALS = [
    Arrival(0, 1, SampledCompletion(segments=((COMMON, 0), (OTHER, 2)), finish_reason="length")),
    Arrival(2, 0, SampledCompletion(segments=((COMMON, 1),))),
]


def scored(rewards: tuple[float | None, ...] = (0.1 + 0.2, None)) -> ScoredGroup:
    return ScoredGroup(
        payload=b"\n\n\0",
        summary=GroupSummary(
            lengths=(1, 2),
            rewards=rewards,
            tokens=3,
            min_version=0,
            max_version=2,
            outcomes={Outcome.CORRECT: 1, Outcome.INCORRECT: 1},
            truncated=(True, False),
            checksums=(1, 2, 2**32 - 1),
        ),
    )


@pytest.mark.parametrize("prompt", [PROMPT, None], ids=["the first ones", "later ones"])
def test_work(prompt: Prompt | None) -> None:
    arrived = Arrived(group=9, prompt=prompt, completions=ARRIVALS)
    message = encode_work(7, [1, 2], arrived)
    assert message.count(COMMON) == 1  # two completions have it in common
    work = decode_work(message)
    assert work is not None
    assert (work.number, work.forgotten, work.arrived) == (7, [1, 2], arrived)
    first, second = work.arrived.completions
    assert first.completion.segments[0][0] is second.completion.segments[0][0]


def test_errors_are_returned_and_those_that_cost_the_worker_are_raised() -> None:
    returned = decode_outcome(encode_outcome(GenerationError("no body")))
    assert (type(returned), str(returned)) == (GenerationError, "no body")
    with pytest.raises(RewardTimeoutError, match="too long"):
        decode_outcome(encode_outcome(RewardTimeoutError("too long"), lost=True))
    assert type(decode_outcome(encode_outcome(ConfigError("environment: none")))) is RewardError  # not another's
    for answer in (b"", b"{}x\n", b'{"scores": 1}\n', b'{"says": "\xff"}\n'):
        outcome = decode_outcome(answer)
        assert isinstance(outcome, RewardError)
        assert str(outcome).startswith("a reward worker's answer is none: ")


def test_numbers_of_numpys() -> None:
    """As environments have them, who take tokens from completions and means of scores."""
    tokens = cast(tuple[int, ...], tuple(np.array([3, 4], np.int32)))
    assert decode_outcome(encode_outcome((SampleRequest(token_ids=tokens, n=1, max_tokens=2),))) == (
        SampleRequest(token_ids=(3, 4), n=1, max_tokens=2),
    )
    rewards = (cast(float, np.float32(0.1)), float(np.mean([1.0, 0.0, 0.0])))
    outcome = decode_outcome(encode_outcome(scored(rewards=rewards)))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.summary.rewards == rewards


@pytest.mark.parametrize("limit", [2**26, 10])
def test_an_outcome_that_can_not_be_sent_costs_its_group(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ANSWER_BYTES", limit)
    given = scored(rewards=(cast(float, 1j), None)) if limit > 10 else scored()
    monkeypatch.setattr(messages, "encode_outcome", lambda outcome: str(outcome).encode())  # of the error that follows
    said = encode_outcome(given).decode()
    assert ("can't be sent: complex is neither" if limit > 10 else "bytes, more than the 10 of an answer") in said
