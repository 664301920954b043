"""A training step as passes over micro-batches: the base class of engines."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_core.algorithm.control import StepCoefficients, make_control, step_coefficients
from areal_core.algorithm.losses import LossStats, k3, policy_loss
from areal_core.algorithm.objectives import Tokens, find_objective
from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.errors import DivergenceError, ModelError
from areal_core.launch import heartbeat
from areal_core.models.adapters import init_adapter, trained_shapes
from areal_core.models.folders import ModelSpec, check_weights, weight_shapes
from areal_core.training.batching.packing import Packed, idle
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import EngineState, StepStats, TrainingBatch
from areal_core.training.model.forward import completion_logprobs
from areal_core.training.model.operations import compiled_for
from areal_core.types import Float32Array

if TYPE_CHECKING:
    from areal_core.training.model.transformers_policy import TransformersPolicy

_MISMATCH_SEQUENCES = 16  # a sample suffices to detect a disagreement between the engines
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")  # kinds of arrays in a saved state
_SUMMED = 2**12  # number of squares summed in float32


def learning_rate(peak: float, warmup_steps: int, update: int) -> float:
    """Rate of optimiser update 0, 1, ...: a linear warm-up to `peak` in `warmup_steps` updates."""
    return peak * min(1.0, (update + 1) / max(1, warmup_steps))


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    """Sum the squares of all elements: in float32 over short rows, in float64 over the rows.

    One float32 sum on a CPU stops growing: the norm of 494M elements would be 8 % too small.
    """
    rows: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().flatten()
        even = len(flat) - len(flat) % _SUMMED
        rows.append(torch.linalg.vector_norm(flat[:even].view(-1, _SUMMED), dim=1, dtype=torch.float32))
        rows.append(torch.linalg.vector_norm(flat[even:], dtype=torch.float32)[None])
    return float(torch.cat(rows).double().square().sum()) if rows else 0.0


def _mean(values: NDArray[np.float64]) -> float:
    return sum(values.tolist()) / max(len(values), 1)


class PolicyEngine(ABC):
    """Base class of `engines.engine.TrainingEngine`s; subclasses implement the abstract methods.

    The policy is the distribution that tokens are sampled from, at the sampling `temperature`. With `lockstep`, model
    passes are collective: a rank with fewer micro-batches than others adds idle ones.

    With `training.lora` the engine trains, saves and publishes an adapter. The model weights are frozen: they have no
    gradient and no optimiser state, and only the dtype of passes.
    """

    lockstep = False

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        ranks: RankGroup | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        """`weights` are version 0 of the model weights; `seed` is that of the adapter, if there is one."""
        check_weights(spec, weights)
        find_objective(algorithm.objective)  # so that an unknown objective fails now, not in the first step
        self.spec, self.training, self.algorithm = spec, training, algorithm
        self.control = make_control(algorithm, training)
        self.temperature = temperature
        self.ranks = ranks or RankGroup()
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, training.dtype)  # of model passes
        self.updates = 0  # optimiser updates so far
        self._compute_s = 0.0
        self.lora = training.lora.adapter
        self.lora_scale = 1.0 if self.lora is None else self.lora.scale
        self.shapes = trained_shapes(spec, self.lora)  # of the trained tensors
        self._copies: list[dict[str, Tensor]] = []  # of the trained tensors, on the host; the newest first
        self._frozen: Mapping[str, Tensor] = {}  # model weights for passes that never change
        self._reference: Mapping[str, Tensor] = {}
        if self.lora is None:
            self._hold(weights, {})
        else:
            adapter = {name: torch.from_numpy(array) for name, array in init_adapter(spec, self.lora, seed).items()}
            self._hold(adapter, {name: weights[name].detach().to(self.dtype) for name in weight_shapes(spec)})
        if algorithm.kl_coef:
            self._reference = self._version_0(weights)
        if spec.transformers is None:
            compiled_for(self.device, self.dtype)  # loads the kernels here, not in the first step

    # -- to be implemented -------------------------------------------------------------------------------------

    @abstractmethod
    def _hold(self, weights: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        """Finish construction: keep the trained weights, in float32 and for passes, and an optimiser.

        The optimiser's moments must exist from the start, so that a state can be saved and loaded at any time. `frozen`
        are the untrained model weights, for passes.
        """

    @abstractmethod
    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the completion tokens, each [A], under the current weights."""

    @abstractmethod
    def start_gradient(self) -> None:
        """Zero the gradient of the last update."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradient. After the `last` one, the ranks' gradients may be summed."""

    @abstractmethod
    def reduce_gradient(self) -> float:
        """Collective. Sum the gradient over the ranks and return its norm."""

    @abstractmethod
    def apply_gradient(self, rate: float, norm: float) -> float:
        """Collective. Clip the gradient and step the optimiser; returns the norm of the weights' change.

        `norm` is the gradient's norm before it is clipped to training.grad_clip.
        """

    @abstractmethod
    def trained(self) -> Iterable[tuple[str, Tensor]]:
        """Collective. Yield the trained weights by name, in the dtype of passes if available, else in float32."""

    @abstractmethod
    def held(self, kind: str) -> dict[str, Float32Array]:
        """Collective. Copy the trained weights (WEIGHT) or MOMENTS by name; ranks above 0 may return none."""

    @abstractmethod
    def put(self, kind: str, values: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's trained weights, in all their precisions, or one of their MOMENTS.

        `values` are whole tensors or this rank's `parts`.
        """

    def parts(self) -> Mapping[str, tuple[int, int]]:
        return {}

    # -- state and weights -------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Float32Array]:
        return self.held(WEIGHT)

    def served(self) -> dict[str, NDArray[Any]]:
        """Use two copies in turns: reused memory takes a fifth of the time of new memory."""
        if self.ranks.rank:
            for _ in self.trained():
                pass
            return {}
        on_gpu = self.device.type == "cuda"
        if len(self._copies) < 2:
            size = sum(math.prod(shape) for shape in self.shapes.values())
            self._copies.append(views(torch.empty(size, dtype=self.dtype, pin_memory=on_gpu), self.shapes))
        copy, *_ = self._copies = self._copies[::-1]
        for name, tensor in self.trained():
            copy[name].copy_(tensor, non_blocking=True)  # and rounded on its own device: on a GPU before the copy
        if on_gpu:
            torch.cuda.synchronize(self.device)
        half = self.dtype == torch.bfloat16
        return {name: (one.view(torch.uint16) if half else one).numpy() for name, one in copy.items()}

    def state(self) -> EngineState:
        arrays: dict[str, NDArray[Any]] = {"rng": torch.get_rng_state().numpy()}
        for kind in (WEIGHT, *MOMENTS):
            arrays |= {f"{kind}/{name}": values for name, values in self.held(kind).items()}
        return EngineState(arrays=arrays, scalars={"updates": self.updates, "control": dict(self.control.state)})

    def load_state(self, state: EngineState) -> None:
        names = {f"{kind}/{name}": shape for kind in (WEIGHT, *MOMENTS) for name, shape in self.shapes.items()}
        for name, shape in names.items():
            values = state.arrays.get(name)
            there = None if values is None else state.shapes.get(name, values.shape)
            if there != shape:
                found = "nothing" if there is None else f"shape {list(there)}"
                raise ModelError(f"{name}: expected shape {list(shape)} in the saved state, got {found}")
        for kind in (WEIGHT, *MOMENTS):
            self.put(kind, {name: torch.from_numpy(state.arrays[f"{kind}/{name}"]) for name in self.shapes})
        self.updates = state.scalars["updates"]
        self.control.state = dict(state.scalars["control"])
        torch.set_rng_state(torch.from_numpy(state.arrays["rng"]))

    # -- a step ------------------------------------------------------------------------------------------------

    def proximal_logprobs(self, batch: TrainingBatch) -> Float32Array:
        if len(batch.minibatches) == 1:
            return np.zeros(len(batch.tokens), np.float32)
        return self._recomputed(batch, batch.later, self._current, "proximal")

    def logprobs(self, batch: TrainingBatch) -> Float32Array:
        """Collective. As `proximal_logprobs`, but for all minibatches."""
        return self._recomputed(batch, sum(batch.microbatches, ()), self._current, "proximal")

    def reference_logprobs(self, batch: TrainingBatch) -> Float32Array:
        """Collective. As `logprobs`, but under version 0 of the run. Needs algorithm.kl_coef above 0."""

        def forward(packed: Packed) -> Tensor:
            return self._logprobs(self._reference, packed)[0]

        return self._recomputed(batch, sum(batch.microbatches, ()), forward, "reference")

    def train_step(self, batch: TrainingBatch, proximal: Float32Array | None) -> StepStats:
        assert proximal is None or self.algorithm.takes_proximal
        coefficients = step_coefficients(self.control, batch.step)
        rate_of = partial(learning_rate, coefficients.learning_rate, self.training.warmup_steps)
        reference = self.reference_logprobs(batch) if self.algorithm.kl_coef else None
        columns = _columns(batch, proximal, reference)
        shares = np.array([batch.loss_tokens, batch.denominators], np.float64)
        loss_tokens, denominators = self.all_reduce_sum(shares).tolist()
        updates: list[tuple[float, float, float]] = []  # loss, norm of the gradient, norm of the change
        stats = LossStats()
        for number, (microbatches, denominator) in enumerate(zip(batch.microbatches, denominators, strict=True)):
            if not denominator:
                continue  # all its completions are masked, on every rank
            own = proximal is not None and number == 0
            loss, sums = self._accumulate(
                columns, microbatches, denominator, coefficients, own_proximal=own, untouched=not updates
            )
            updates.append((loss, *self._update(batch.step, loss, rate_of(self.updates))))
            stats += sums
        losses, norms, changes = np.array(updates, np.float64).reshape(-1, 3).T
        totals = self.all_reduce_sum(losses)
        stats = sum(self.ranks.gathered(stats), LossStats())
        done = StepStats(
            loss=_mean(totals),
            grad_norm=_mean(norms),
            update_norm=_mean(changes),
            learning_rate=rate_of(max(self.updates - 1, 0)),
            updates=len(updates),
            loss_tokens=int(sum(loss_tokens)),
            train_inference_kl=stats.train_inference_kl / stats.matched if stats.matched else None,
            metrics=(stats.metrics() if stats.tokens else {})
            | {f"control/{name}": value for name, value in coefficients.given.items()},
        )
        self.control.observe(done.curves)
        return done

    @torch.no_grad()
    def train_inference_kl(
        self, batch: TrainingBatch, weights: Mapping[str, NDArray[Any]], version: int
    ) -> tuple[float, int]:
        published = {name: torch.from_numpy(array).to(self.device, self.dtype) for name, array in weights.items()}
        tensors = {**self._frozen, **published}
        of_version = (batch.versions == version) & batch.loss_mask
        holding = np.unique(np.repeat(np.arange(len(batch.lengths)), batch.lengths)[of_version])
        total, tokens = 0.0, 0
        for packed in batch.cut(holding[:_MISMATCH_SEQUENCES].tolist()):
            with self._computing():
                ours, _ = self._logprobs(tensors, packed)
            matched = torch.from_numpy(of_version[packed.source])
            theirs = torch.from_numpy(batch.behaviour_logprobs[packed.source])
            total += float(k3((ours.cpu().double() - theirs)[matched]).sum())
            tokens += int(matched.sum())
        return total, tokens

    def all_reduce_sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        start = time.perf_counter()
        try:
            return self.ranks.all_reduce_sum(values)
        finally:
            self._compute_s += time.perf_counter() - start  # nearly all of it waits for ranks that still compute

    def compute_s(self) -> float:
        taken, self._compute_s = self._compute_s, 0.0
        return taken

    # -- helpers -----------------------------------------------------------------------------------------------

    def _logprobs(
        self, weights: Mapping[str, Tensor], packed: Packed, *, recompute_layers: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the completion tokens, each [A], under any weights.

        The model's kind selects the forward pass.
        """
        if self.spec.transformers is None:
            return completion_logprobs(
                self.spec,
                weights,
                packed,
                temperature=self.temperature,
                recompute_layers=recompute_layers,
                lora_scale=self.lora_scale,
            )
        self._transformers.install(weights)
        return self._transformers(packed)

    def _version_0(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole reference policy in the dtype of passes, on every rank. Frozen weights are not copied.

        A state that is loaded later does not change it.
        """
        if self.lora is None:
            return {n: weights[n].detach().to(self.device, self.dtype, copy=True) for n in weight_shapes(self.spec)}
        frozen = self._frozen or {n: weights[n].detach().to(self.device, self.dtype) for n in weight_shapes(self.spec)}
        nothing = {n: torch.zeros(shape, device=self.device, dtype=self.dtype) for n, shape in self.shapes.items()}
        return {**frozen, **nothing}

    @cached_property
    def _transformers(self) -> TransformersPolicy:
        return self._transformers_policy()

    def _transformers_policy(self, *, whole: bool = False) -> TransformersPolicy:
        from areal_core.training.model.transformers_policy import TransformersPolicy  # an import of seconds

        return TransformersPolicy(
            self.spec,
            temperature=self.temperature,
            checkpoint_activations=self.training.checkpoint_activations,
            whole=whole,
            lora=self.lora,
        )

    def _passes(self, microbatches: Sequence[Packed]) -> Iterator[tuple[bool, Packed | None]]:
        """Yield (whether it is the last pass, micro-batch), with None for an idle pass.

        If passes are collective, all ranks yield equally many.
        """
        count = len(microbatches)
        if self.lockstep:
            count = max(1, int(self.ranks.all_reduce_max(np.array([count]))[0]))
        for index in range(count):
            heartbeat.progressed()
            yield index + 1 == count, microbatches[index] if index < len(microbatches) else None

    def _current(self, packed: Packed) -> Tensor:
        return self.forward(packed)[0]

    def _recomputed(
        self, batch: TrainingBatch, microbatches: Sequence[Packed], forward: Callable[[Packed], Tensor], policy: str
    ) -> Float32Array:
        """Compute log-probabilities of completion tokens in these micro-batches. [S]; 0 at other tokens."""
        recomputed = np.zeros(len(batch.tokens), np.float32)
        with torch.no_grad(), self._computing():
            for _, packed in self._passes(microbatches):
                logprobs = forward(packed or idle())
                if packed is not None:
                    recomputed[packed.source] = logprobs.float().cpu().numpy()
        finite = self.all_reduce_sum(np.array([np.isfinite(recomputed).all()], np.float64))[0] == self.ranks.size
        if not finite:
            raise DivergenceError(f"{policy} log-probabilities of step {batch.step} are not finite")
        return recomputed

    def _accumulate(
        self,
        columns: Mapping[str, NDArray[Any]],
        microbatches: Sequence[Packed],
        denominator: float,
        coefficients: StepCoefficients,
        *,
        own_proximal: bool,
        untouched: bool,
    ) -> tuple[float, LossStats]:
        """Compute loss and gradient of a minibatch's local share.

        With `own_proximal` the same pass gives pi_prox. `untouched`: the step has made no update yet.
        """
        total, stats = 0.0, LossStats()
        with self._computing():
            self.start_gradient()
            for last, packed in self._passes(microbatches):
                if packed is None:
                    self.backward(0.0 * self.forward(idle())[0].sum(), last=last)
                    continue
                current, entropy = self.forward(packed)
                tokens = Tokens(
                    current=current,
                    entropy=entropy,
                    coefficients=coefficients.others,
                    **self._known(columns, packed),
                )
                if own_proximal:
                    tokens = replace(tokens, proximal=current.detach())
                loss, sums = policy_loss(tokens, coefficients.algorithm, denominator=denominator, untouched=untouched)
                self.backward(loss, last=last)
                total += float(loss.detach())
                stats += sums
        return total, stats

    def _known(self, columns: Mapping[str, NDArray[Any]], packed: Packed) -> dict[str, Any]:
        """Return the `columns` of a micro-batch's tokens, with its completions numbered from 0."""
        held = {name: values[packed.source] for name, values in columns.items()}
        completions, held["sequence"] = np.unique(held["sequence"], return_inverse=True)
        tensors = {name: torch.from_numpy(values).to(self.device) for name, values in held.items()}
        return tensors | {"sequences": len(completions)}

    def _update(self, step: int, loss: float, rate: float) -> tuple[float, float]:
        """Make one optimiser update. Returns the norms of the gradient, before clipping, and of the weights' change."""
        with self._computing():
            norm = self.reduce_gradient()
        if not math.isfinite(norm):
            raise DivergenceError(
                f"step {step}, update {self.updates}: loss {loss} and gradient norm {norm} must be finite"
            )
        with self._computing():
            change = self.apply_gradient(rate, norm)
        self.updates += 1
        return norm, change

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count the seconds inside as compute time: forward, backward and optimiser."""
        start = time.perf_counter()
        try:
            with self.ranks.naming():  # with `lockstep`, passes and maybe updates are collective
                yield
        finally:
            self._compute_s += time.perf_counter() - start


def _columns(
    batch: TrainingBatch, proximal: Float32Array | None, reference: Float32Array | None
) -> dict[str, NDArray[Any]]:
    """Return an objective's inputs for the batch's tokens, [S] each, by the fields of objectives.Tokens."""
    columns: dict[str, NDArray[Any]] = {
        "behaviour": batch.behaviour_logprobs,
        "advantages": batch.advantages,
        "mask": batch.loss_mask,
        "weights": batch.weights,
        "staleness": batch.step - 1 - batch.versions,
        "sequence": np.repeat(np.arange(len(batch.lengths)), batch.lengths),
    }
    recomputed = {"proximal": proximal, "reference": reference}
    return columns | {name: values for name, values in recomputed.items() if values is not None}


def views(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Split `flat` into tensors of the given shapes that lie end to end and share its memory."""
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
