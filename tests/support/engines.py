"""Every training engine through the same steps; run as a module, one rank that goes through all cases in turn."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.config.schema import AlgorithmConfig, TrainingConfig
from areal_core.errors import DivergenceError, ModelError
from areal_core.models.spec import ModelSpec
from areal_core.models.tensorfile import to_bfloat16
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import EngineState, StepStats
from areal_core.training.engines.policy_engine import PolicyEngine
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.types import Float32Array
from tests.support.training import QWEN3, SPEC, TRAINING, batch, weights
from tests.support.transformers_models import run_by_transformers

STAGES = (0, 1, 2, 3)
WHOLE = "whole"
CUTS = {  # capacity, and whether prompts are computed once a group
    WHOLE: (10_000, False),
    "shared": (10_000, True),
    "small": (20, True),  # a completion or a few in a micro-batch
}
# Ranks -> stage and cut: every pair of the three occurs.
SHARED = {
    1: ((0, WHOLE), (1, "small"), (2, WHOLE), (3, "small")),
    2: ((0, "small"), (1, WHOLE), (2, "small"), (3, WHOLE)),
}
RECOMPUTED = (1, 3)
SMALL = (0, 2, 3)
DIVERGED = ((0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16"))
BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch recomputed": {"checkpoint_activations": True},
    "0": {"stage": 0},
    "2 bfloat16": {"stage": 2, "dtype": "bfloat16"},
    "3 recomputed": {"stage": 3, "checkpoint_activations": True},
}
TIMEOUT_S = 240.0
OTHER = replace(SPEC, vocab_size=40)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a rank; weights and gradient on rank 0 alone."""

    stats: list[StepStats]
    weights: dict[str, Float32Array]
    gradient: dict[str, Float32Array]  # of the first update, clipped
    error: str = ""


def run(size: int, folder: Path) -> dict[int, dict[str, Outcome]]:
    """The outcomes of each rank of a group, by case, on a machine without a compiler."""
    folder.mkdir()
    environment = {**os.environ, "PATH": "", "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    with (folder / "log").open("w+") as log:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-X",
                    "faulthandler",
                    "-m",
                    "tests.support.engines",
                    str(rank),
                    str(size),
                    str(folder),
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )
            for rank in range(size)
        ]
        try:
            ended = [rank.wait(TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        log.seek(0)
        assert ended == [0] * size, log.read()
    assert not (folder / "home").exists(), "something was compiled or cached"
    saved = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(size)]
    return {rank: {case: Outcome(**fields) for case, fields in seen.items()} for rank, seen in enumerate(saved)}


class Cases:
    """All cases that a group of this size goes through, in the same order on each of its ranks."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.folder = folder
        self.ranks = RankGroup(rank, size, rendezvous=folder / "rendezvous", timeout_s=60)

    def all(self) -> Iterator[tuple[str, Outcome]]:
        for cut in CUTS:
            yield f"torch {cut}", self.steps(self.engine(None), cut)
        for stage, cut in SHARED[self.ranks.size]:
            yield f"{stage} {cut}", self.steps(self.engine(stage), cut)
        if self.ranks.size == 1:
            yield "relay 1", self.second_leg()
            yield "refused", self.refused()
            return
        for stage in STAGES:
            yield f"uneven {stage}", self.steps(self.engine(stage), last=3, minibatches=5)
            yield f"bfloat16 {stage}", self.steps(self.engine(stage, dtype="bfloat16"), last=3)
        for stage in RECOMPUTED:
            yield f"recomputed {stage}", self.steps(self.engine(stage, checkpoint_activations=True), last=2)
        for stage in SMALL:
            yield f"small {stage}", self.steps(self.engine(stage, dtype="bfloat16", learning_rate=1e-6), last=1)
        for stage, dtype in DIVERGED:
            yield f"diverged {dtype} {stage}", self.diverged(self.engine(stage, dtype=dtype))
        yield "qwen3 3", self.steps(self.engine(3, spec=QWEN3), last=1)
        spec = run_by_transformers(SPEC)
        for case, fields in BY_TRANSFORMERS.items():
            yield f"transformers {case}", self.steps(self.engine(spec=spec, **fields), last=2)
        yield "relay 2", self.first_leg()

    def engine(
        self, stage: int | None = None, *, spec: ModelSpec = SPEC, alone: bool = False, **fields: object
    ) -> PolicyEngine:
        """With its ZeRO stage, or None for the torch engine; `alone`: as if there were no other rank."""
        training: TrainingConfig = replace(TRAINING, **fields)  # type: ignore[arg-type]
        ranks = RankGroup() if alone else self.ranks
        if stage is None:
            return TorchEngine(spec, weights(spec), training, AlgorithmConfig(), ranks=ranks)
        from areal_core.training.engines.deepspeed_engine import DeepSpeedEngine

        gc.freeze()  # DeepSpeed collects garbage several times an engine, through all that is imported
        training = replace(training, zero_stage=stage)
        return DeepSpeedEngine(spec, weights(spec), training, AlgorithmConfig(), ranks=ranks)

    def steps(self, engine: PolicyEngine, cut: str = WHOLE, *, last: int = 5, minibatches: int = 2) -> Outcome:
        """One update by all groups, then steps of several minibatches."""
        stats = self.train(engine, range(1, 2), cut, minibatches=1)
        gradient = {
            name.removeprefix("exp_avg/"): values / (1 - np.float32(TRAINING.beta1))
            for name, values in engine.state().arrays.items()
            if name.startswith("exp_avg/")
        }
        stats += self.train(engine, range(2, last + 1), cut, minibatches=minibatches)
        weights, served = engine.weights(), engine.served()
        assert served.keys() == (weights.keys() if self.ranks.rank == 0 else set())
        for name, values in served.items():
            half = values.dtype == np.uint16
            np.testing.assert_array_equal(values, to_bfloat16(weights[name]) if half else weights[name])
        return Outcome(stats=stats, weights=weights, gradient=gradient)

    def train(self, engine: PolicyEngine, steps: range, cut: str = WHOLE, *, minibatches: int = 2) -> list[StepStats]:
        stats: list[StepStats] = []
        capacity, share_prompts = CUTS[cut]
        for step in steps:
            share = batch(
                step,
                rank=engine.ranks.rank,
                world_size=engine.ranks.size,
                minibatches=minibatches,
                capacity=capacity,
                share_prompts=share_prompts,
            )
            stats.append(engine.train_step(share, engine.proximal_logprobs(share)))
        return stats

    def diverged(self, engine: PolicyEngine) -> Outcome:
        """One rank has a token that is not a number; then both go on with sound batches. The gradient is what the
        weights changed by meanwhile."""
        before = engine.weights()
        share = batch(9, rank=self.ranks.rank, world_size=self.ranks.size, minibatches=1)
        proximal = engine.proximal_logprobs(share)
        broken = share.behaviour_logprobs.copy()
        if self.ranks.rank == 0:
            broken[np.flatnonzero(share.loss_mask & (share.advantages != 0))[0]] = np.nan
        error = _message(
            DivergenceError, lambda: engine.train_step(replace(share, behaviour_logprobs=broken), proximal)
        )
        change = {name: values - before[name] for name, values in engine.weights().items()}
        stats = self.train(engine, range(1, 3))
        return Outcome(stats=stats, weights=engine.weights(), gradient=change, error=error)

    def first_leg(self) -> Outcome:
        """Two steps of the torch engine, then two of two ranks that partition moments and gradient."""
        torch_engine, engine = self.engine(None, alone=True), self.engine(2)
        stats = self.train(torch_engine, range(1, 3))
        engine.load_state(own(torch_engine.state(), engine))
        stats += self.train(engine, range(3, 5))
        state = engine.state()
        if self.ranks.rank == 0:
            (self.folder / "state").write_bytes(pickle.dumps(state))
        return Outcome(stats=stats, weights=engine.weights(), gradient={})

    def second_leg(self) -> Outcome:
        """Two steps of stage 3, used before, with the state that two ranks left; then two of the torch engine."""
        torch_engine, engine = self.engine(None), self.engine(3)
        self.train(engine, range(1, 2))
        engine.load_state(own(pickle.loads((self.folder.parent / "2" / "state").read_bytes()), engine))
        stats = self.train(engine, range(5, 7))
        torch_engine.load_state(engine.state())
        stats += self.train(torch_engine, range(7, 9))
        return Outcome(stats=stats, weights=torch_engine.weights(), gradient={})

    def refused(self) -> Outcome:
        """A state of another model."""
        engine = self.engine(3)
        before = engine.weights()
        other = TorchEngine(OTHER, weights(OTHER), TRAINING, AlgorithmConfig())
        error = _message(ModelError, lambda: engine.load_state(other.state()))
        change = {name: values - before[name] for name, values in engine.weights().items()}
        return Outcome(stats=[], weights=engine.weights(), gradient=change, error=error)


def own(state: EngineState, engine: PolicyEngine) -> EngineState:
    """What a rank reads of a saved state: those parts that it holds."""
    parts = engine.parts()
    assert parts
    arrays = {
        name: array.flatten()[slice(*parts[name])] if name in parts else array for name, array in state.arrays.items()
    }
    return replace(state, arrays=arrays, shapes={name: array.shape for name, array in state.arrays.items()})


def _message(kind: type[Exception], action: Callable[[], object]) -> str:
    """Of the error that the action must end with."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def _main(rank: int, size: int, folder: Path) -> None:
    cases = Cases(rank, size, folder)
    seen = {case: vars(outcome) for case, outcome in cases.all()}
    (folder / f"rank-{rank}").write_bytes(pickle.dumps(seen))
    cases.ranks.close()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
