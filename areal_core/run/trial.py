"""The verifier's first call, before any process of a run starts: a bug is found where it costs nothing."""

from __future__ import annotations

from collections.abc import Callable

from areal_core.config.schema import RunConfig
from areal_core.errors import RewardError, RewardTimeoutError, UserCodeError, VerifierError
from areal_core.rewards.worker import outcome_apart
from areal_core.types import Prompt


def try_verifier(config: RunConfig, task: Prompt, log: Callable[[str], None]) -> None:
    """Have the verifier judge the gold answer of a prompt, in a process of its own. Raises UserCodeError with the
    traceback, the prompt and the completion where it raises, returns no score from 0 to 1, hangs or dies."""
    try:
        found = outcome_apart(config, task, task.answer)
    except (VerifierError, RewardTimeoutError) as error:
        raise UserCodeError(str(error)) from None
    except RewardError as error:
        log(f"{config.environment.judged_by} has no result for the gold answer of the first prompt: {error}")
        return
    if found.failure is not None:
        raise UserCodeError(found.failure)
