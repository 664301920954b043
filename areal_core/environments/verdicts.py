"""Verdicts on completions, from verifiers that may fail, hang or return anything.

    await Judge(config.environment, verify)(task, text, truncated=False) -> Verdict

A verifier is user code. `Judge` converts and checks its result. An exception becomes a verdict without a result, whose
`failure` shows the traceback, the prompt and the completion. `Failures` logs the first failure of each kind completely,
counts repeats, and ends the run after too many.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from areal_core.config.groups import EnvironmentConfig
from areal_core.errors import RewardError, RewardTimeoutError, RewardWorkerError, UserCodeError, printable
from areal_core.types import Outcome, Prompt

_TRIES = 2  # attempts of a verifier that raises, for one completion
_SHOWN = 2000  # most characters of a prompt or a completion in an error; the middle is left out
_FRAMES = 12  # most stack frames in an error
_OURS = re.compile(r"/areal_core/(rewards/|environments/verdicts\.py)|/asyncio/")  # files whose frames call user code


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's outcome for a completion, and its score."""

    outcome: Outcome
    score: float | None  # from 0, incorrect, to 1, correct; None: no result
    answer: str | None = None  # the answer that the verifier extracted from the completion
    failure: str | None = None  # why there is no result: one line, then traceback, prompt and completion
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # further numbers, by curve name
    bonus: float = 0.0  # added to the reward beside the score, from environment.rewards

    @classmethod
    def of(cls, outcome: Outcome, answer: str | None = None) -> Verdict:
        """Build a verdict with score 1 for CORRECT, no score for FAILED, and 0 for all other outcomes."""
        return cls(outcome, None if outcome is Outcome.FAILED else float(outcome is Outcome.CORRECT), answer)

    @classmethod
    def read(cls, found: object) -> Verdict:
        """Convert a verifier's result: a Verdict, or a score, also as a scalar of numpy or torch.
        Raises ValueError for anything else, and for a score outside 0 to 1."""
        if not isinstance(found, Verdict):
            score = _score(found)
            return cls(Outcome.CORRECT if score == 1.0 else Outcome.INCORRECT, score)
        outcome, score = Outcome(found.outcome), None if found.score is None else _score(found.score)
        if (outcome is Outcome.FAILED) != (score is None):
            raise ValueError(
                f"a Verdict's score must be None if its outcome is failed, and a number otherwise, got {found!r:.200}"
            )
        answer, failure = (None if text is None else str(text) for text in (found.answer, found.failure))
        return cls(outcome, score, answer, failure, found.metrics)


Verifier = Callable[[Prompt, str], "float | Verdict | Awaitable[float | Verdict]"]
"""Judges a completion's text. Returns a Verdict, or a score from 0, incorrect, to 1, correct. May be an `async def`.
A verdict without a score says nothing about the completion. After a RewardError the whole group is tried again. A
verifier with a true attribute `bounded` limits the time of its own awaits."""


class IsolatedVerifier(functools.partial[Awaitable[Verdict]]):
    """A Verifier that judges each completion in its own process, once its group has killed a worker.

    Its exceptions do not come from user code.
    """


def _score(found: Any) -> float:
    said = f"a verifier must return a score from 0 to 1, or a Verdict, got {printable(repr(found))[:200]}"
    try:
        score = float(found.item() if hasattr(found, "item") else found)
    except Exception:  # noqa: BLE001 - the boundary to numbers of any type
        raise ValueError(said) from None
    if isinstance(found, str | bytes) or not 0.0 <= score <= 1.0:
        raise ValueError(said)
    return score


class Judge:
    """Judges completions with one verifier."""

    def __init__(self, config: EnvironmentConfig, verify: Verifier, name: str | None = None) -> None:
        """`config` says whether truncated completions are verified.
        It also names the verifier, unless `name` does."""
        self._name, self._verify, self._verify_truncated = name or config.judged_by, verify, config.verify_truncated

    async def __call__(self, task: Prompt, text: str, *, truncated: bool) -> Verdict:
        """Judge a completion's text.
        A verifier that raises is called once more; then the verdict has no result. Raises RewardError if the verifier
        does, RewardTimeoutError if an await takes over `limit_s` seconds, and the errors of an IsolatedVerifier."""
        if truncated and not self._verify_truncated:
            return Verdict.of(Outcome.INCORRECT)
        if isinstance(self._verify, IsolatedVerifier):
            return await self._verify(task, text)
        before = _now.set((self._name, task, text))
        on_verdict()
        try:
            with unlimited():
                return await self._called(task, text)
        finally:
            _now.reset(before)
            on_verdict()

    async def _called(self, task: Prompt, text: str) -> Verdict:
        failure = None
        for _ in range(_TRIES):
            limit = asyncio.timeout(None if getattr(self._verify, "bounded", False) else limit_s)
            try:
                found = self._verify(task, text)
                if inspect.isawaitable(found):
                    async with limit:
                        found = await found
                return Verdict.read(found)
            except RewardError as error:
                raise RewardError(str(error)) from error  # other processes may not know a user's own class
            except BaseException as error:  # the boundary to user code
                if limit.expired():
                    raise RewardTimeoutError(hang_text(stack_of(error), timeout_text(limit_s or 0.0))) from None
                if isinstance(error, asyncio.CancelledError | GeneratorExit) and _is_ending():
                    raise
                failure = error_text(self._name, error, (task, text))
        return Verdict(Outcome.FAILED, None, failure=failure)


def _is_ending() -> bool:
    """Whether the current task was cancelled, or its coroutine closed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


# -- state of the current verdict -------------------------------------------------------------------------------------

limit_s: float | None = None  # limit of an awaited verdict, in seconds; None: no limit
unlimited: Callable[[], AbstractContextManager[None]] = nullcontext  # suspends the rollout's limit in a verdict
on_verdict: Callable[[], object] = list  # called when a verdict begins and when it ends
# Verifier name, task and text that this context is judging.
_now: ContextVar[tuple[str, Prompt, str] | None] = ContextVar("now", default=None)


# -- messages for people -----------------------------------------------------------------------------------------------


def error_text(name: str, error: BaseException, judged: tuple[Prompt, str] | None = None) -> str:
    """Explain an error of the user code `name`: place, then traceback, prompt and completion.
    All lines after the first are indented, so that a completion can't imitate another message."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack[:] = own = _own(shown.stack)
    message = printable(f"{type(error).__name__}: {shown}")[:500]
    return _block(f"{name}: {message}{_place(own)}", "".join(shown.format()), judged)


def failure_text(name: str, message: str, task: Prompt, text: str) -> str:
    """Explain a failure without a traceback, in the format of `error_text`."""
    return _block(f"{name}: {message}", "", (task, text))


def timeout_text(limit_s: float) -> str:
    """Say that there is no verdict after `limit_s` seconds; for `hang_text`."""
    return f"no verdict within {limit_s:g} s (rollout.reward_timeout_s)"


def hang_text(stack: Sequence[traceback.FrameSummary], message: str) -> str:
    """Explain that the user code at this `stack` takes too long, in the format of `error_text`."""
    now, own = _now.get(), _own(stack)
    name, judged = ("the environment", None) if now is None else (now[0], now[1:])
    return _block(f"{name}: {message}{_place(own)}", "".join(traceback.format_list(own)), judged)


def stack_of(error: BaseException) -> Sequence[traceback.FrameSummary]:
    """The stack of a coroutine that asyncio.timeout ended with this error."""
    return traceback.extract_tb((error.__cause__ or error).__traceback__)


def _own(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The last frames of user code, without this package's frames around them."""
    ours = [_OURS.search(each.filename) is not None for each in stack]
    last = next((place for place in range(len(ours), 0, -1) if not ours[place - 1]), 0)
    first = next((place for place in range(last, 0, -1) if ours[place - 1]), 0)
    return list(stack[first:last])[-_FRAMES:]


def _place(own: list[traceback.FrameSummary]) -> str:
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _block(first: str, stack: str, judged: tuple[Prompt, str] | None) -> str:
    lines = stack.splitlines()
    if judged is not None:
        task, text = judged
        for what, said in (("prompt", task.text), ("gold answer", task.answer), ("completion", text)):
            shown = said if len(said) <= _SHOWN else f"{said[: _SHOWN // 2]} [...] {said[-_SHOWN // 2 :]}"
            lines += [f"{what}:", *(f"    {line}" for line in shown.split("\n"))]
    return "\n".join([first, *(f"    {printable(line)}" for line in lines)])


logger = logging.getLogger(__name__)
_GROUPS = 32  # number of latest groups over which rollouts without a result are counted
_LEAST = 4  # least number of groups with such rollouts before their share ends the run
_LOST_FIRST, _LOST = 3, 12  # attempts in a row that kill a worker and end the run: before its first verdict, and later
_PLACE = re.compile(r" \([^()]*:\d+\)$")  # file and line at the end of a failure's first line


class Failures:
    """The failures of one run's verifier and environment, since its controller started."""

    def __init__(self, max_share: float) -> None:
        """`max_share` is environment.max_no_result, the largest share of recent rollouts without a result."""
        self._max_share = max_share
        self._shares = deque[float](maxlen=_GROUPS)  # share of rollouts without a result, by group
        self._lost = 0  # attempts in a row that killed a worker
        self._judged = False  # the verifier has judged a completion
        self._seen: Counter[str] = Counter()  # failures by name, error and place

    def count_failed_attempt(self, error: RewardError) -> None:
        """Count a failed attempt of a group.
        Raises UserCodeError after too many in a row that killed a worker."""
        self._show(str(error))
        self._lost += isinstance(error, RewardTimeoutError | RewardWorkerError)
        if self._lost >= (_LOST if self._judged else _LOST_FIRST):
            said = f"{self._lost} attempts in a row timed out or killed the reward worker, so the run stops"
            raise UserCodeError(f"{_first(str(error))}: {said}; fix this code, or raise rollout.reward_timeout_s")

    def count_group(self, outcomes: Mapping[Outcome, int], failure: str | None, *, truncated: int = 0) -> None:
        """Count a group that was scored, or dropped with its `failure` and no outcomes.
        The `truncated` rollouts do not count. Raises UserCodeError if too many rollouts have no result."""
        rollouts = max(0, sum(outcomes.values()) - outcomes.get(Outcome.CUT, 0) - truncated)
        missing = outcomes.get(Outcome.FAILED, 0)
        if outcomes and failure is not None:
            self._show(failure, max(1, missing))
        if rollouts > missing + outcomes.get(Outcome.TIMED_OUT, 0):
            self._lost, self._judged = 0, True
        if outcomes and not rollouts:
            return
        self._shares.append(missing / rollouts if outcomes else 1.0)
        mean = sum(self._shares) / len(self._shares)
        if mean > self._max_share and sum(share > 0 for share in self._shares) >= _LEAST:
            said = _first(failure) if failure else "the verifier has no result"
            raise UserCodeError(
                f"{said}: {mean:.0%} of the rollouts of the last {len(self._shares)} groups have no result, more than "
                f"{self._max_share:.0%}; fix the verifier, or raise environment.max_no_result"
            )

    def _show(self, failure: str, times: int = 1) -> None:
        first, *rest = failure.split("\n")
        name, _, said = first.partition(": ")
        place = _PLACE.search(first)
        kind = f"{name}: {said.partition(': ')[0]}{place.group() if place else ''}"  # without text that may vary
        before = self._seen[kind]
        self._seen[kind] += times
        if before == 0:
            logger.error("%s", first)
            for line in rest:
                logger.warning("%s", line)
        if (now := self._seen[kind]) >= 10 and len(str(now)) > len(str(before)):
            logger.warning("%d times so far: %s", now, first)


def _first(failure: str) -> str:
    return failure.partition("\n")[0]
