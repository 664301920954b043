"""A verdict in a process of its own, which its verifier may hang or end.

python -m areal_core.rewards.apart    # a job on stdin, its outcome on stdout; both pickled
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import subprocess
import sys

from areal_core.config.schema import RunConfig
from areal_core.environments import verdicts
from areal_core.environments.registry import open_judge
from areal_core.environments.verdicts import Verdict
from areal_core.errors import ArealError, RewardTimeoutError, VerifierError
from areal_core.launch.process import die_with_parent
from areal_core.types import Outcome, Prompt

START_S = 120.0  # for a process to import numpy and tokenizers, on a machine that may be busy
LAST_WORDS_S = 3.0  # beyond its time limit, for a process to say where it hangs


def outcome(config: RunConfig, prompt: Prompt, text: str) -> Verdict:
    """The verdict on a text. Raises RewardTimeoutError with its stack for a verifier that hangs, VerifierError for one
    that ends its process or can't be imported, and what the verifier raises."""
    job, command = pickle.dumps((config, prompt, text)), [sys.executable, "-m", __name__]
    name, limit_s = config.environment.judged_by, config.rollout.reward_timeout_s
    try:
        ended = subprocess.run(command, input=job, stdout=subprocess.PIPE, timeout=START_S + limit_s, check=False)
        found: Verdict | ArealError = pickle.loads(ended.stdout)  # from our own code alone
    except subprocess.TimeoutExpired:
        raise RewardTimeoutError(verdicts.told(name, f"no verdict within {limit_s:g} s", prompt, text)) from None
    except EOFError:
        how = f"it ended its process, with status {ended.returncode}"
        raise VerifierError(verdicts.told(name, how, prompt, text)) from None
    if isinstance(found, ArealError):
        raise found
    return found


def judge(config: RunConfig, prompt: Prompt, text: str) -> Verdict:
    """The verdict on a text that may have cost a worker its process: one that does so here is wrong."""
    try:
        return outcome(config, prompt, text)
    except (RewardTimeoutError, VerifierError) as error:
        return Verdict(Outcome.TIMED_OUT, 0.0, failure=str(error))


def main() -> None:
    from areal_core.rewards.worker import attempt, limited

    die_with_parent()
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a verifier prints is no outcome
    config, prompt, text = pickle.load(sys.stdin.buffer)
    opened, limit_s = attempt(open_judge, config), config.rollout.reward_timeout_s

    async def judged() -> Verdict:  # in an event loop, as environments call it
        return opened(prompt, text, truncated=False)

    found = opened
    if not isinstance(opened, ArealError):
        faulthandler.dump_traceback_later(limit_s + LAST_WORDS_S / 2)  # of native code that takes no signal
        with limited(lambda error: pickle.dump(error, said), limit_s):
            found = attempt(lambda _: asyncio.run(judged()), None)
    pickle.dump(found, said)


if __name__ == "__main__":
    main()
