"""Groups that are scored in this process, and read back whole."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from areal_core.api.scored_groups import ScoredGroup, read_group
from areal_core.api.wire import Arrival, SampledCompletion, encode_generation
from areal_core.config.schema import RunConfig
from areal_core.environments.environment import Environment
from areal_core.environments.registry import open_environment
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.group import GroupRollout
from areal_core.types import Completion, GenerationRequest, GroupPayload, PackedGroup, Prompt
from tests.support.policies import END, TOKENIZER


class RewardsHere:
    """Runs an environment in this process, as reward workers do in theirs."""

    def __init__(self, environment: Environment, config: RunConfig) -> None:
        self._environment, self._config = environment, config

    def begin(self, prompt: Prompt, n: int, *, apart: bool, shown: bool = False) -> GroupRollout:
        return GroupRollout(self._environment, prompt, self._config, n=n, shown_with=TOKENIZER if shown else None)


_tokenizer = functools.lru_cache(Tokenizer.from_folder)


def score_group(
    config: RunConfig, model_path: str, prompt: Prompt, completions: Sequence[SampledCompletion]
) -> ScoredGroup:
    """Score a group that requests no more than its first completions. Raises as `GroupRollout.next_outcome`."""
    environment = open_environment(config, _tokenizer(model_path))

    async def score() -> object:
        rollout = GroupRollout(environment, prompt, config, n=len(completions))
        rollout.deliver([Arrival(0, index, one) for index, one in enumerate(completions)])
        return await rollout.next_outcome()

    with asyncio.Runner() as runner:
        outcome = runner.run(score())
    assert isinstance(outcome, ScoredGroup), f"{config.environment.name} requests more completions"
    return outcome


def whole_completions(body: bytes, n: int) -> tuple[SampledCompletion, ...]:
    """The `n` completions of a body that holds all of them, finished."""
    return tuple(SampledCompletion(segments=((body, index),)) for index in range(n))


def served(*completions: Completion) -> tuple[SampledCompletion, ...]:
    """As a server would return them."""
    request = GenerationRequest(
        request_id="1", token_ids=(2,), n=len(completions), max_tokens=9, seed=0, stop_token_ids=(END,)
    )
    return whole_completions(encode_generation(request, completions), len(completions))


def unpack_group(data: bytes, group: PackedGroup) -> GroupPayload:
    """All of a group, as `read_group` reads it."""
    return read_group(lambda spans: [data[start:end] for start, end in spans], group, range(len(group.lengths)))
