"""Generate and score one group's rollouts, passing each completion to the environment as it ends.

If the environment opens with the prompt, the group begins with one request for the first turns of all rollouts.
Otherwise a reward worker starts the environment first, and the environment requests its completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from areal_core.api.pending_completions import PendingCompletions, seed_of
from areal_core.api.scored_groups import ScoredGroup
from areal_core.api.wire import Arrival
from areal_core.errors import GenerationError, RewardError, RewardTimeoutError, RewardWorkerError
from areal_core.types import GenerationRequest, SampleRequest, Tally

_Outcome = tuple[SampleRequest, ...] | ScoredGroup


class Session(Protocol):
    """The environment session of one group: its rollouts, in a reward worker."""

    def deliver(self, arrivals: Sequence[Arrival]) -> None:
        """Pass completions to the environment.
        The first call starts it, with completions of the opening request if any."""
        ...

    async def next_outcome(self) -> _Outcome:
        """Wait for the environment's next requests, or for the scored group.
        Raises RewardError, or GenerationError for a response without completions; the caller must then close the
        session."""
        ...

    def cut(self) -> None:
        """End unfinished rollouts: without a result if they wait for the policy, else as incorrect."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class _Part:
    """One request of the group, and the task that generates its completions."""

    pending: PendingCompletions
    rollouts: tuple[int, ...]  # the rollout of each completion
    generating: asyncio.Task[None] | None = None  # None once the result of the finished task was checked


class Rollouts:
    """Generate and score one group. The environment gets each completion without waiting for the others."""

    def __init__(
        self,
        request: GenerationRequest,
        opens: bool,
        generate: Callable[[PendingCompletions], Coroutine[Any, Any, None]],
        begin: Callable[[bool], Session],
        deadline_s: float | None = None,
    ) -> None:
        """`request` asks for the first turns of all rollouts, if the environment `opens` with the prompt.
        Later requests differ in prompt, limit and seed. `generate` finishes pending completions or raises
        GenerationError; as the run ends it may return early. If cancelled, it leaves all sampled tokens in them.
        `begin(costs_workers)` opens a session; the flag says that scoring this group has killed a worker. `deadline_s`
        limits an attempt, in seconds; then the unfinished rollouts are cut."""
        self._request = request
        self._generate = generate
        self._begin = begin
        self._session: Session | None = None
        self._next_outcome: asyncio.Task[_Outcome] | None = None  # the session's next requests, or its scored group
        self._costs_workers = False
        self._lost: list[PendingCompletions] = []  # of requests that a failure has discarded
        self._before = [0] * request.n  # lengths in failed attempts
        self._changed = asyncio.Event()
        self._deadline_s = deadline_s
        self._deadline: float | None = None  # of this attempt, in event-loop time
        self._opening = [self._part(request, range(request.n))] if opens else []
        self._parts = self._opening[:]

    async def scored(self) -> ScoredGroup | None:
        """Return the scored group, or None if the run ends before all completions are generated.

        Raises the error of a request or of the environment. A second call resumes, and repeats failed requests. After a
        RewardError it restarts the environment with the completions of the opening request. After a GenerationError of
        the environment these completions are unreadable, and the call generates new ones."""
        for part in self._parts:
            self._start(part)
        if self._session is None and self._deadline_s is not None:
            self._deadline = asyncio.get_running_loop().time() + self._deadline_s
        if not self._opening:
            self._deliver([])
        while True:
            self._changed.clear()
            self._raise_failures()
            if arrivals := self._new_arrivals():
                self._deliver(arrivals)
            if self._next_outcome is not None and self._next_outcome.done():
                outcome = await self._take_outcome(self._next_outcome)
                if isinstance(outcome, ScoredGroup):
                    return outcome
                for asked in outcome:
                    self._request_further(asked)
            elif any(part.generating is not None for part in self._parts) or self.complete:
                try:
                    async with asyncio.timeout_at(self._deadline):
                        await self._changed.wait()
                except TimeoutError:
                    self._cut()
            else:
                return None

    @property
    def sent(self) -> bool:
        """Whether any request has reached a server, whose counters then include it."""
        return any(part.pending.sent for part in self._parts)

    def sampled(self) -> Tally:
        """Count the tokens received from servers, except those that `take_discarded` has returned."""
        return sum((pending.sampled() for pending in self._pending()), Tally())

    def take_discarded(self) -> Tally:
        """Count the tokens that a failure has discarded since the last call."""
        discarded = sum((pending.take_discarded() for pending in self._pending()), Tally())
        self._lost = []
        return discarded

    @property
    def complete(self) -> bool:
        """Whether the environment has received every requested completion."""
        return not any(part.pending.unfinished() or part.pending.has_finished for part in self._parts)

    async def __aenter__(self) -> Rollouts:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop generation and close the session. Afterwards `sampled` is final."""
        self._close_session()
        await _end(self._parts)

    # -- inside ------------------------------------------------------------------------------------------------

    def _start(self, part: _Part) -> None:
        if part.generating is None and part.pending.unfinished():
            part.generating = asyncio.ensure_future(self._generate(part.pending))
            part.generating.add_done_callback(lambda _: self._changed.set())

    def _raise_failures(self) -> None:
        """Raise the error of a failed request; the other requests continue."""
        for part in self._parts:
            if part.generating is not None and part.generating.done():
                ended, part.generating = part.generating, None
                ended.result()

    def _new_arrivals(self) -> list[Arrival]:
        return [
            Arrival(request, index, completion)
            for request, part in enumerate(self._parts)
            for index, completion in part.pending.finished()
        ]

    def _cut(self) -> None:
        self._deadline = None
        if self._session is None:
            self._deliver([])
        assert self._session is not None
        self._session.cut()

    def lengths(self, *, cut: bool = False) -> list[int]:
        """Sampled tokens of each rollout; with `cut`, only of the rollouts that wait for completions."""
        tokens, waiting = [0] * self._request.n, set[int]()
        for part in self._parts:
            for rollout, length in zip(part.rollouts, part.pending.lengths(), strict=True):
                tokens[rollout] += length
            waiting |= {part.rollouts[index] for index in part.pending.unfinished()}
        if cut:
            return [tokens[rollout] for rollout in sorted(waiting)]
        return list(map(max, tokens, self._before))

    def _deliver(self, arrivals: Sequence[Arrival]) -> None:
        if self._session is None:
            self._session = self._begin(self._costs_workers)
            self._await_outcome(self._session)
        elif not arrivals:
            return  # the session has already begun
        self._session.deliver(arrivals)

    def _await_outcome(self, session: Session) -> None:
        self._next_outcome = asyncio.ensure_future(session.next_outcome())
        self._next_outcome.add_done_callback(self._outcome_arrived)

    def _outcome_arrived(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # mark as retrieved: `scored` raises it unless cancelled meanwhile
        self._changed.set()

    async def _take_outcome(self, task: asyncio.Task[_Outcome]) -> _Outcome:
        try:
            outcome = task.result()
        except (GenerationError, RewardError) as error:
            self._close_session()
            self._before = self.lengths()
            self._costs_workers |= isinstance(error, RewardTimeoutError | RewardWorkerError)
            later = self._parts[len(self._opening) :]
            await _end(later)
            for part in later:
                part.pending.discard()
            self._lost += [part.pending for part in later]
            self._parts = self._opening[:]
            for part in self._opening:
                if isinstance(error, GenerationError):
                    await _end([part])
                    part.pending.discard()
                else:
                    part.pending.repeat()
            raise
        if self._session is not None and not isinstance(outcome, ScoredGroup):
            self._await_outcome(self._session)
        return outcome

    def _request_further(self, asked: SampleRequest) -> None:
        """Derive the seed from the call, so that it does not depend on which completion finished first."""
        seed = seed_of(b"call/%d/%d/%d" % (self._request.seed, *asked.calls[0]))
        request = replace(
            self._request,
            request_id=f"{self._request.request_id}-further-{seed}",
            token_ids=asked.token_ids,
            n=len(asked.calls),
            max_tokens=asked.max_tokens,
            seed=seed,
            stop_token_ids=(*self._request.stop_token_ids, *asked.stop),
        )
        self._parts.append(part := self._part(request, [rollout for rollout, _ in asked.calls]))
        self._start(part)

    def _part(self, request: GenerationRequest, rollouts: Iterable[int]) -> _Part:
        part = _Part(PendingCompletions(request), tuple(rollouts))
        part.pending.notify = self._changed.set
        return part

    def _close_session(self) -> None:
        if self._session is not None and self._next_outcome is not None:
            self._next_outcome.cancel()
            self._session.close()
            self._session = self._next_outcome = None

    def _pending(self) -> list[PendingCompletions]:
        return [*self._lost, *(part.pending for part in self._parts)]


async def _end(parts: Sequence[_Part]) -> None:
    """Cancel the generation of `parts` and wait for its end, even if this call is cancelled."""
    tasks = [part.generating for part in parts if part.generating is not None]
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    for part in parts:
        if part.generating is not None and not part.generating.cancelled():
            part.generating.exception()  # mark as retrieved; errors after a cancel do not matter
        part.generating = None
    if cancelled is not None:
        raise cancelled


def trajectory_seed(run_seed: int, prompt_index: int, requeues: int) -> int:
    """Seed of a group's sampling streams, 63 bits: the same in every attempt and on every server."""
    return seed_of(f"{run_seed}/{prompt_index}/{requeues}".encode())
