"""The verifier's first call, before any process of a run starts: a bug is found where it costs nothing.

python -m areal_core.run.trial FD    # a job on stdin, its outcome into the pipe FD; both pickled
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

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
    ours, theirs = Pipe()
    with theirs, ours:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        try:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(job))
            process.stdin.close()
            return ours.recv() if ours.poll(_START_S + job[0] + LAST_WORDS_S) else None
        except (EOFError, BrokenPipeError):
            return None
        finally:
            process.kill()
            process.wait()


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what a verifier prints is no outcome
    timeout_s, environment, task, prompt = pickle.load(sys.stdin.buffer)

    def judged(_: None) -> Verdict:
        return open_judge(environment, task)(prompt, prompt.answer, truncated=False)

    with limited(lambda error: pipe.send(error), timeout_s):
        found = attempt(judged, None)
    pipe.send(found)


if __name__ == "__main__":
    main()
