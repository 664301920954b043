"""Emulated engines whose time passes in sleep alone, so that everything about it can be said exactly."""

from __future__ import annotations

from areal_core.config.groups import EmulationConfig
from areal_core.generation.engines.emulated import EmulatedEngine
from areal_core.planning.time_model import Pace, TimeModel
from areal_core.types import GenerationRequest
from tests.support.models import SPEC

SCALE = 8  # real tokens that one of the wire stands for
LIMIT = 20  # tokens of the wire
CONFIG = EmulationConfig(
    speed=50.0,
    tokens_per_token=SCALE,
    length_median=70.0,
    length_sigma=0.6,
    decode_overhead_s=0.01,
    prefill_share=0.5,
    handover_s=0.5,
)
MODEL = TimeModel(CONFIG)


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def pace(clock: Clock, config: EmulationConfig = CONFIG) -> Pace:
    return Pace(config.speed, clock=clock.now, sleep=clock.sleep)


def engine(clock: Clock, config: EmulationConfig = CONFIG, *, slots: int = 64) -> EmulatedEngine:
    return EmulatedEngine(SPEC, config, slots=slots, context=32, pace=pace(clock, config))


def request(name: str = "r", *, n: int = 4, seed: int = 7, max_tokens: int = LIMIT) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, token_ids=(3, 4, 5), n=n, max_tokens=max_tokens, seed=seed, stop_token_ids=(1,)
    )
