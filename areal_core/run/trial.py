"""The verifier's first call, before any process of a run starts: a bug is found where it costs nothing.

python -m areal_core.run.trial    # a job on stdin, its outcome on stdout; both pickled
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable

from areal_core.config.schema import EnvironmentConfig, RunConfig, TaskConfig
from areal_core.environments.registry import open_judge
from areal_core.environments.verdicts import Verdict
from areal_core.errors import ArealError, RewardError, RewardTimeoutError, UserCodeError
from areal_core.rewards.worker import LAST_WORDS_S, attempt, limited
from areal_core.types import Prompt

_START_S = 120.0  # for imports, on a busy machine
_Job = tuple[float, EnvironmentConfig, TaskConfig, Prompt]


def try_verifier(config: RunConfig, task: Prompt, log: Callable[[str], None]) -> None:
    """Have the verifier judge the gold answer of a prompt, in a process of its own. Raises UserCodeError with the
    traceback, the prompt and the completion where it raises, returns no score from 0 to 1, hangs or dies."""
    found = _outcome((config.rollout.reward_timeout_s, config.environment, config.task, task))
    name = config.environment.judged_by
    if isinstance(found, Verdict):
        if found.failure is not None:
            raise UserCodeError(found.failure)
    elif isinstance(found, RewardTimeoutError):
        raise UserCodeError(str(found))
    elif isinstance(found, RewardError):
        log(f"{name} has no result for the gold answer of the first prompt: {found}")
    elif isinstance(found, ArealError):
        raise found
    else:
        raise UserCodeError(f"{name}: it ends its process, or never returns, on the gold answer of the first prompt")


def _outcome(job: _Job) -> Verdict | ArealError | None:
    """None where there is none."""
    command, limit_s = [sys.executable, "-m", __name__], _START_S + job[0] + LAST_WORDS_S
    try:
        said = subprocess.run(command, input=pickle.dumps(job), stdout=subprocess.PIPE, timeout=limit_s, check=False)
        return pickle.loads(said.stdout)  # from our own code alone
    except (subprocess.TimeoutExpired, EOFError):
        return None


def main() -> None:
    outcome = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints is no outcome
    timeout_s, environment, task, prompt = pickle.load(sys.stdin.buffer)

    def judged(_: None) -> Verdict:
        return open_judge(environment, task)(prompt, prompt.answer, truncated=False)

    def tell(found: Verdict | ArealError) -> None:
        outcome.write(pickle.dumps(found))
        outcome.flush()

    with limited(tell, timeout_s):
        found = attempt(judged, None)
    tell(found)


if __name__ == "__main__":
    main()
