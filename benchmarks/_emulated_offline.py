"""What an emulated run's steps take by the time model alone: no processes, no waiting, a few seconds of arithmetic.

The engines are those of a run, on clocks of their own; between them stands what the controller decides: who gets a
group, the staleness bound, when weights are swapped. What real processes take beside is left out, so that it can be
seen by comparison. Prompts and answers' lengths are those of a run with the same seed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from areal_core.config import RunConfig
from areal_core.data.source import open_source
from areal_core.data.tokenizer import char_tokenizer
from areal_core.emulation import Pace, TimeModel
from areal_core.generation.emulated import EmulatedEngine
from areal_core.generation.served import Generation
from areal_core.rollout.controller import trajectory_seed
from areal_core.rollout.gate import StalenessGate
from areal_core.training.warmup import embedded_spec
from areal_core.types import GenerationRequest

SYNC_STEPS = 24
ASYNC_STEPS, ASYNC_WARM = 60, 20
_ENDLESS = 10**9  # steps
_MUCH_S = 0.02  # of overhead a decode step
_FEWEST = 32  # slots that a fit tries
_IDLE_S = 0.5  # emulated seconds after which a server without work looks again


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Means over steps, in emulated seconds."""

    step_s: float
    tokens_per_s: float  # consumed, of the slice
    generation_s: float  # sync: from a batch's first token to its last
    train_s: float  # computing of the trainer, a switch not included


def simulate(config: RunConfig) -> Simulated:
    return _sync(config) if config.mode == "sync" else _async(config)


class _Server:
    """An engine and its clock."""

    def __init__(self, config: RunConfig) -> None:
        self._speed = config.emulation.speed
        self._real_s = 0.0
        self.answers = 0  # in flight
        self.engine = EmulatedEngine(
            embedded_spec(config),
            config.emulation,
            slots=config.generation.slots,
            context=config.task.max_prompt_tokens + config.task.max_new_tokens,
            switches=config.mode == "sync",
            pace=Pace(self._speed, clock=lambda: self._real_s, sleep=self._sleep),
        )

    @property
    def now_s(self) -> float:
        return self._real_s * self._speed

    def skip_to(self, now_s: float) -> None:
        self._real_s = max(self._real_s, now_s / self._speed)

    def add(self, request: GenerationRequest) -> None:
        self.engine.add(request)
        self.answers += request.n

    def step(self) -> list[Generation]:
        """The groups that ended."""
        if not (self.engine.running or self.engine.waiting):
            self.skip_to(self.now_s + _IDLE_S)
            return []
        ended = self.engine.step()
        self.answers -= sum(group.request.n for group in ended)
        return ended

    def _sleep(self, seconds: float) -> None:
        self._real_s += seconds


def _requests(config: RunConfig) -> Callable[[int], GenerationRequest]:
    """The request of each group of a run."""
    source = open_source(config, char_tokenizer())

    def request(index: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"group-{index}",
            token_ids=source.prompt(index).token_ids,
            n=config.algorithm.group_size,
            max_tokens=config.task.max_new_tokens,
            seed=trajectory_seed(config.seed, index, 0),
            stop_token_ids=(1,),
        )

    return request


class _Trainer:
    """Emulated seconds and real tokens of batches."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._time = TimeModel(config.emulation)
        self._accelerators = config.training_ranks * config.emulation.tensor_parallel
        self.transfer_s = self._time.transfer_s()

    def tokens(self, batch: list[Generation]) -> int:
        """That were sampled."""
        return self._config.emulation.tokens_per_token * sum(
            len(answer.token_ids) for group in batch for answer in group.answers
        )

    def train_s(self, batch: list[Generation]) -> float:
        lengths = [
            self._config.emulation.tokens_per_token * (len(group.request.token_ids) + len(answer.token_ids))
            for group in batch
            for answer in group.answers
        ]
        proximal_s = self._time.forward_s(lengths, self._accelerators) if self._config.recomputes_proximal else 0.0
        return proximal_s + self._time.train_s(lengths, self._accelerators)


def _sync(config: RunConfig) -> Simulated:
    servers = [_Server(config) for _ in range(config.generation_servers)]
    trainer, request = _Trainer(config), _requests(config)
    now_s = generation_s = train_s = 0.0
    tokens = 0
    for step in range(SYNC_STEPS):
        for server in servers:
            server.skip_to(now_s)
        for index in range(step * config.groups_per_batch, (step + 1) * config.groups_per_batch):
            min(servers, key=lambda server: server.answers).add(request(index))
        batch: list[Generation] = []
        for server in servers:
            while server.answers:
                batch += server.step()
        end_s = max(server.now_s for server in servers)
        generation_s += end_s - now_s
        trained_s = trainer.train_s(batch)
        train_s += trained_s
        now_s = end_s + trained_s + 2 * config.emulation.switch_s + trainer.transfer_s
        tokens += trainer.tokens(batch)
    return Simulated(
        step_s=now_s / SYNC_STEPS,
        tokens_per_s=tokens / now_s,
        generation_s=generation_s / SYNC_STEPS,
        train_s=train_s / SYNC_STEPS,
    )


def _async(config: RunConfig) -> Simulated:
    """The server whose clock is furthest behind goes on; whatever happens happens at its time."""
    servers = [_Server(config) for _ in range(config.generation_servers)]
    trainer, request = _Trainer(config), _requests(config)
    gate = StalenessGate(batch_size=config.rollout.batch_size, max_staleness=config.max_staleness, steps=_ENDLESS)
    group, capacity = config.algorithm.group_size, 2 * config.generation.slots * len(servers)
    admitted = version = 0
    ready: list[Generation] = []
    batch: list[Generation] = []  # being trained on
    trained_s = 0.0  # when the batch will be trained
    loaded_s: float | None = None  # when the newest weights will be with the servers; None: they are
    ends: list[float] = []
    tokens: list[int] = []
    train_s: list[float] = []
    while len(ends) < ASYNC_STEPS:
        server = min(servers, key=lambda server: server.now_s)
        now_s = server.now_s
        if loaded_s is not None and now_s >= loaded_s:
            version, loaded_s = version + 1, None
            for each in servers:
                each.engine.swap(None, version)
        if batch and now_s >= trained_s:
            ends.append(trained_s)
            tokens.append(trainer.tokens(batch))
            batch, loaded_s = [], trained_s + trainer.transfer_s
        if not batch and len(ready) >= config.groups_per_batch:
            batch, ready = ready[: config.groups_per_batch], ready[config.groups_per_batch :]
            train_s.append(trainer.train_s(batch))
            trained_s = now_s + train_s[-1]
        while gate.admits(group, admitted=admitted, version=version) and _in_flight(servers) + group <= capacity:
            min(servers, key=lambda server: server.answers).add(request(admitted // group))
            admitted += group
        ready += server.step()
    duration_s = ends[-1] - ends[ASYNC_WARM - 1]
    return Simulated(
        step_s=duration_s / (ASYNC_STEPS - ASYNC_WARM),
        tokens_per_s=sum(tokens[ASYNC_WARM:]) / duration_s,
        generation_s=0.0,
        train_s=sum(train_s[ASYNC_WARM:ASYNC_STEPS]) / (ASYNC_STEPS - ASYNC_WARM),
    )


def _in_flight(servers: list[_Server]) -> int:
    return sum(server.answers for server in servers)


def with_overhead(config: RunConfig, seconds: float) -> RunConfig:
    return replace(config, emulation=replace(config.emulation, decode_overhead_s=seconds))


def overhead_share(config: RunConfig) -> float:
    """Of a synchronous batch's generation: what goes to `decode_overhead_s`."""
    without = simulate(with_overhead(config, 0.0)).generation_s
    return 1 - without / simulate(config).generation_s


def fit(sync: RunConfig, asynchronous: RunConfig, sync_s: float, async_s: float) -> tuple[float, int]:
    """`emulation.decode_overhead_s`, then `generation.slots`, with which steps take `sync_s` and `async_s`."""
    # Lengths are what they are, so that a synchronous step grows by the same with every second of overhead.
    none, much = (simulate(with_overhead(sync, seconds)).step_s for seconds in (0.0, _MUCH_S))
    overhead_s = round(_MUCH_S * (sync_s - none) / (much - none), 4)
    slow = with_overhead(asynchronous, overhead_s)

    def faster(slots: int) -> float:
        return -simulate(replace(slow, generation=replace(slow.generation, slots=slots))).step_s

    return overhead_s, bisect.bisect_left(range(asynchronous.rollout.batch_size), -async_s, lo=_FEWEST, key=faster)
