"""Step times in virtual time: emulated engines without sleep, and a trainer by the time model.

The overhead of real processes between two steps is left out; `benchmarks.emulated` includes it. In asynchronous mode a
finished completion is replaced at once if Eq. 3 admits another one. A new version reaches the servers after one
transfer time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from areal_core.config.schema import RunConfig
from areal_core.generation.engines.emulated import EmulatedEngine
from areal_core.planning.time_model import Pace, TimeModel
from areal_core.training.warmup import embedded_spec
from areal_core.types import GenerationRequest

_SPEED = 5_000.0  # emulated seconds in a second of the virtual clock: an engine's step is up to 20 of them
_PROMPT_TOKENS = 4  # of the wire
_STOP = 1
_REQUESTS = 1_000_000  # more than those of a seed


class _Server:
    """Emulated generation server with its own clock."""

    def __init__(self, config: RunConfig) -> None:
        self._clock_s = 0.0
        self.updates: list[float] = []  # when versions arrive that it does not have, emulated seconds
        self.engine = EmulatedEngine(
            embedded_spec(config),
            config.emulation,
            slots=config.generation.slots,
            context=config.model.context,
            switches=config.takes_turns,
            pace=Pace(_SPEED, clock=lambda: self._clock_s, sleep=self._sleep),
        )

    @property
    def now_s(self) -> float:
        """Emulated time in seconds."""
        return self._clock_s * _SPEED

    @property
    def load(self) -> int:
        return self.engine.running + self.engine.waiting

    def _sleep(self, seconds: float) -> None:
        self._clock_s += seconds

    def wait(self, until_s: float) -> None:
        """Advance the idle clock to this time."""
        self._clock_s = max(self._clock_s, until_s / _SPEED)

    def step(self) -> list[tuple[int, int]]:
        """Length (prompt and completion) and oldest policy version of each finished sequence."""
        return [
            (_PROMPT_TOKENS + len(completion.token_ids), int(completion.versions[0]))
            for done in self.engine.step()
            for completion in done.completions.values()
        ]


def synchronous_s(config: RunConfig) -> float:
    """Emulated seconds of a synchronous step, which waits for its longest completion."""
    servers, requests = _servers(config), _requests(config, config.algorithm.group_size)
    for _ in range(config.groups_per_batch):
        min(servers, key=lambda server: server.load).engine.add(next(requests))
    lengths: list[int] = []
    for server in servers:
        while server.load:
            lengths += [length for length, _ in server.step()]
    its, model = config.emulation, TimeModel(config.emulation)
    between_s = 2 * its.switch_s if config.takes_turns else its.handover_s
    training_s = model.train_s(_real(config, lengths), _accelerators(config))
    return max(server.now_s for server in servers) + its.rewards_s + training_s + model.transfer_s() + between_s


def asynchronous_s(config: RunConfig, steps: int = 12) -> float:
    """Emulated seconds of an asynchronous step: the mean of the second half of `steps`."""
    return asynchronous(config, steps)[0]


def asynchronous(config: RunConfig, steps: int) -> tuple[float, list[int]]:
    """Emulated seconds of an asynchronous step, and staleness by completion.
    Staleness counts versions between that of the oldest token and the trained one."""
    servers, requests = _servers(config), _requests(config, 1)
    model, batch, later = TimeModel(config.emulation), config.rollout.batch_size, 1 - 1 / config.training.minibatches
    ready: list[tuple[float, int, int]] = []  # when a sequence ended, its length, its oldest version
    lags: list[list[int]] = []  # by step
    admitted = version = 0
    ends: list[float] = []  # of steps, the last of which may not be over
    while version < steps:
        server = min(servers, key=lambda each: each.now_s)
        if version < len(ends) and ends[-1] <= server.now_s:
            version += 1
            for each in servers:
                each.updates.append(ends[-1] + model.transfer_s())
        if version == len(ends) and len(ready) >= batch:
            taken, ready = ready[:batch], ready[batch:]
            lengths = _real(config, [length for _, length, _ in taken])
            lags.append([len(ends) - oldest for *_, oldest in taken])
            passes_s = model.train_s(lengths, _accelerators(config))
            passes_s += later * model.forward_s(lengths, _accelerators(config))
            ends.append(max([taken[-1][0], *ends[-1:]]) + passes_s)
        if server.updates and server.updates[0] <= server.now_s:
            del server.updates[0]
            server.engine.swap(None, server.engine.version + 1)
        while server.load < config.generation.slots and admitted < (version + config.pipeline_depth + 1) * batch:
            server.engine.add(next(requests))
            admitted += 1
        if server.load:
            ready += [(server.now_s, *ended) for ended in server.step()]
        else:
            server.wait(max(ends[-1], server.now_s + 1) if version < len(ends) else server.now_s + 1)
    half = steps // 2
    step_s = (ends[steps - 1] - ends[half - 1]) / (steps - half)
    return step_s, [lag for of_step in lags[half:steps] for lag in of_step]


def _servers(config: RunConfig) -> list[_Server]:
    return [_Server(config) for _ in range(config.generation_servers)]


def _requests(config: RunConfig, completions: int) -> Iterator[GenerationRequest]:
    for number in count():
        yield GenerationRequest(
            request_id=f"{number}",
            token_ids=(2,) * _PROMPT_TOKENS,
            n=completions,
            max_tokens=config.task.max_new_tokens,
            seed=config.seed * _REQUESTS + number,
            stop_token_ids=(_STOP,),
        )


def _real(config: RunConfig, lengths: Sequence[int]) -> list[int]:
    return [length * config.emulation.tokens_per_token for length in lengths]


def _accelerators(config: RunConfig) -> int:
    return config.training_ranks * config.emulation.replicas * config.emulation.tensor_parallel
