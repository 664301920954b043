"""What an emulated run's steps take by the time model alone: no processes, no waiting, a few seconds of arithmetic.

The engines are those of a run, on clocks of their own; between them stands what the controller decides: who gets a
group, the staleness bound, when weights are swapped. What real processes take beside is left out, so that it can be
seen by comparison. Prompts and answers' lengths are those of a run with the same seed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from areal_core.config.schema import RunConfig
from areal_core.environments.source import open_source
from areal_core.generation.engines.emulated import EmulatedEngine
from areal_core.generation.engines.engine import Generation
from areal_core.models.tokenizer import char_tokenizer
from areal_core.planning.time_model import Pace, TimeModel
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
    generated_tokens_per_s: float  # of the slice
    generation_s: float  # sync: from a batch's first token to its last
    train_s: float  # computing of the trainer, a switch not included


def simulate(config: RunConfig, *, steps: int = ASYNC_STEPS, warm: int = ASYNC_WARM) -> Simulated:
    """An asynchronous run makes `steps` steps, of which the first `warm` are not counted."""
    return _sync(config) if config.mode == "sync" else _async(config, steps, warm)


class _Server:
    """An engine and its clock."""

    def __init__(self, config: RunConfig) -> None:
        self._speed = config.emulation.speed
        self._scale = config.emulation.tokens_per_token
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

    @property
    def generated(self) -> int:
        """Tokens so far, real ones."""
        return self._scale * self.engine.stats.generated_tokens

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
        # The first minibatch has no forward pass for the proximal policy alone.
        self._later = 1.0 - 1.0 / config.training.minibatches if config.recomputes_proximal else 0.0
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
        return self._later * self._time.forward_s(lengths, self._accelerators) + self._time.train_s(
            lengths, self._accelerators
        )


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
        generated_tokens_per_s=sum(server.generated for server in servers) / now_s,
        generation_s=generation_s / SYNC_STEPS,
        train_s=train_s / SYNC_STEPS,
    )


def _async(config: RunConfig, steps: int, warm: int) -> Simulated:
    """The server whose clock is furthest behind goes on; whatever happens happens at its time."""
    servers = [_Server(config) for _ in range(config.generation_servers)]
    trainer, request = _Trainer(config), _requests(config)
    gate = StalenessGate(batch_size=config.rollout.batch_size, max_staleness=config.max_staleness, steps=_ENDLESS)
    group, capacity = config.algorithm.group_size, 2 * config.generation.slots * len(servers)
    update = _Update(servers, trainer.transfer_s, waits=config.interruption == "wait")
    admitted = 0
    ready: list[Generation] = []
    batch: list[Generation] = []  # being trained on
    trained_s = 0.0  # when the batch will be trained
    ends: list[float] = []
    generated: list[int] = []  # until then
    tokens: list[int] = []
    train_s: list[float] = []
    while len(ends) < steps:
        server = min(servers, key=lambda server: server.now_s)
        now_s = server.now_s
        update.go_on(server)
        if batch and now_s >= trained_s:
            ends.append(trained_s)
            generated.append(sum(each.generated for each in servers))
            tokens.append(trainer.tokens(batch))
            batch = []
            update.published(trained_s)
        if not batch and len(ready) >= config.groups_per_batch:
            batch, ready = ready[: config.groups_per_batch], ready[config.groups_per_batch :]
            train_s.append(trainer.train_s(batch))
            trained_s = now_s + train_s[-1]
        while gate.admits(group, admitted=admitted, version=update.version) and _in_flight(servers) + group <= capacity:
            min(servers, key=lambda server: server.answers).add(request(admitted // group))
            admitted += group
        ready += server.step()
    duration_s = ends[-1] - ends[warm - 1]
    return Simulated(
        step_s=duration_s / (steps - warm),
        tokens_per_s=sum(tokens[warm:]) / duration_s,
        generated_tokens_per_s=(generated[-1] - generated[warm - 1]) / duration_s,
        generation_s=0.0,
        train_s=sum(train_s[warm:steps]) / (steps - warm),
    )


class _Update:
    """What brings published versions to the servers, one at a time, the newest first. Where it waits, each server goes
    on with what runs, starts nothing more, and swaps when it has nothing running."""

    def __init__(self, servers: list[_Server], transfer_s: float, *, waits: bool) -> None:
        self.version = 0  # that every server has
        self._servers, self._transfer_s, self._waits = servers, transfer_s, waits
        self._newest = 0
        self._target = 0  # that they have or are being given
        self._arrives_s = 0.0  # when they can have it
        self._left: list[_Server] = []  # servers that are still to swap

    def published(self, now_s: float) -> None:
        self._newest += 1
        self._begin(now_s)

    def go_on(self, server: _Server) -> None:
        """At the time of this server, whose clock is furthest behind."""
        if self.version == self._target or server.now_s < self._arrives_s:
            return
        for each in list(self._left):
            each.engine.admitting = not self._waits
            if each is server or not self._waits:
                self._swap(each)
        if not self._left:
            self.version = self._target
            self._begin(server.now_s)

    def _begin(self, now_s: float) -> None:
        if self.version == self._target < self._newest:
            self._target, self._arrives_s, self._left = self._newest, now_s + self._transfer_s, list(self._servers)

    def _swap(self, server: _Server) -> None:
        if self._waits and server.engine.running:
            return
        server.engine.swap(None, self._target)
        server.engine.admitting = True
        self._left.remove(server)


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
