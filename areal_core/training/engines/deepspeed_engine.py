"""The DeepSpeed engine: partitions training state over ranks (ZeRO, arXiv 1910.02054).

Stage 0 partitions nothing. Stage 1 partitions the optimiser's state, including the float32 weights. Stage 2 also
partitions the gradient. Stage 3 also partitions the model weights for passes, and gathers them layer by layer. The
engine uses no DeepSpeed operator that needs compilation.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_core.errors import ConfigError
from areal_core.training.batching.packing import Packed
from areal_core.training.engines.policy_engine import MOMENTS, WEIGHT, PolicyEngine, sum_of_squares
from areal_core.training.model.forward import PolicyModule
from areal_core.types import Float32Array

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed reads it at import
import deepspeed
import deepspeed.ops
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

if TYPE_CHECKING:
    from areal_core.training.model.transformers_policy import TransformersPolicy

_BUCKET = 500_000_000  # largest number of elements reduced or gathered at once


class DeepSpeedEngine(PolicyEngine):
    """A training engine whose passes are collective, even for a rank with no micro-batch left.

    training.dtype=bfloat16 is the precision of passes and of one micro-batch's gradient. Sums over micro-batches and
    ranks are float32, and so are the optimiser's weights and moments. DeepSpeed (0.19.8) has no such sum at stage 0.
    There the engine keeps only float32 weights, and each layer rounds its weights as it runs. At stage 1 every rank has
    the whole float32 gradient.
    """

    lockstep = True

    def _hold(self, weights: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        training = self.training
        self._stage = training.zero_stage
        self._mixed = self.dtype != torch.float32 and self._stage > 0  # DeepSpeed keeps model weights in two precisions
        module = self._module(weights, frozen)
        self._parameters = {name: module.named_weights[name] for name in self.shapes}  # the trained ones
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(),
            betas=(training.beta1, training.beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
            fused=True,
        )
        self._engine = self._wrapped(module)
        if self._stage < 3:
            self._frozen = {name: module.named_weights[name].detach() for name in frozen}
        self._start_moments()
        if self._mixed:
            for name, parameter in self._parameters.items():
                self._put(parameter, WEIGHT, weights[name].float())
        self._before: list[Tensor] = []
        self._change = 0.0  # sum of squares of an update's change of this rank's weights
        self._optimiser.register_step_pre_hook(self._remember)
        self._optimiser.register_step_post_hook(self._measure)

    # -- passes ------------------------------------------------------------------------------------------------

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        return self._engine(packed)

    def start_gradient(self) -> None:
        """Do nothing: the last update zeroed the gradient."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.ranks.size)  # DeepSpeed takes the mean over ranks

    def reduce_gradient(self) -> float:
        """Return the norm only; the last backward pass has summed the gradient."""
        return math.sqrt(self._over_ranks(sum_of_squares(self._gradient())))

    def apply_gradient(self, rate: float, norm: float) -> float:
        self._optimiser.param_groups[0]["lr"] = rate
        for part in self._parts():
            self._optimiser.state[part]["step"].fill_(self.updates)
        self._change = 0.0
        for part in self._gradient():  # clipped here, because DeepSpeed would use a float32 sum of squares
            part.mul_(min(1.0, self.training.grad_clip / (norm + 1e-6)))
        self._engine.step()
        return math.sqrt(self._over_ranks(self._change))

    # -- state and weights -------------------------------------------------------------------------------------

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return this rank's parts. Every rank has whole weights up to stage 2, and whole moments at stage 0."""
        kinds = {0: (), 3: (WEIGHT, *MOMENTS)}.get(self._stage, MOMENTS)
        return {
            f"{kind}/{name}": self._part(parameter) for kind in kinds for name, parameter in self._parameters.items()
        }

    def put(self, kind: str, values: Mapping[str, Tensor]) -> None:
        if self._stage == 3:
            self._engine.empty_partition_cache()  # layers gathered ahead would keep their old weights
        for name, parameter in self._parameters.items():
            self._put(parameter, kind, values[name])

    def trained(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, self._whole(parameter, WEIGHT) if self._stage == 3 else parameter.detach()

    def held(self, kind: str) -> dict[str, Float32Array]:
        """Copy one tensor at a time; empty on ranks other than 0."""
        arrays: dict[str, Float32Array] = {}
        for name, parameter in self._parameters.items():
            whole = self._whole(parameter, kind)
            if self.ranks.rank == 0:
                arrays[name] = whole.cpu().numpy().copy()
        return arrays

    def _whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Collective if the tensor is partitioned. Return a weight or moment in float32, in the model's shape."""
        if kind == WEIGHT and self._stage < 3 and not self._mixed:
            return parameter.detach()
        if kind != WEIGHT and self._stage == 0:
            return self._optimiser.state[parameter][kind]
        whole = (
            safe_get_full_fp32_param(parameter) if kind == WEIGHT else safe_get_full_optimizer_state(parameter, kind)
        )
        assert whole is not None, "DeepSpeed doesn't know the parameter"
        return whole

    def _put(self, parameter: Any, kind: str, values: Tensor) -> None:
        """Overwrite this rank's part of a weight, in all its precisions, or of a moment."""
        values = values.to(self.device)
        if self._stage == 3:  # DeepSpeed pads the last parts with zeros
            part = self._own(parameter, values)
            part = nn.functional.pad(part, (0, parameter.ds_tensor.numel() - len(part)))
            if kind == WEIGHT:
                parameter.ds_tensor.data.copy_(part)
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, kind)
        elif kind == WEIGHT:
            parameter.data.copy_(values)
            safe_set_full_fp32_param(parameter, values)  # has no effect at stage 0
        elif self._stage == 0:
            self._optimiser.state[parameter][kind].copy_(values)
        elif (mapping := parameter._hp_mapping) is not None:
            mapping.get_hp_fragment(kind).copy_(self._own(parameter, values))

    def _part(self, parameter: Any) -> tuple[int, int]:
        """Return the range of elements of a partitioned parameter, or of its moments, on this rank.

        At stage 3 every rank has an equal part of each parameter. At lower stages all parameters are partitioned end to
        end.
        """
        if self._stage == 3:
            size, there = parameter.ds_tensor.numel(), parameter.ds_numel
            return min(size * self.ranks.rank, there), min(size * (self.ranks.rank + 1), there)
        if (mapping := parameter._hp_mapping) is None:  # this rank's optimiser has nothing of it
            return 0, 0
        address = mapping.lp_fragment_address
        return address.start, address.start + address.numel

    def _own(self, parameter: Any, values: Tensor) -> Tensor:
        """Return this rank's part of `values`, flat. `values` are whole or already that part."""
        start, stop = self._part(parameter)
        flat = values.flatten()
        return flat if len(flat) == stop - start else flat[start:stop]

    # -- this rank's parts in DeepSpeed ------------------------------------------------------------------------

    def _parts(self) -> list[Tensor]:
        """Return the float32 weights of this rank's optimiser: flat parts of the model, or at stage 0 all."""
        if self._stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [part for group in self._optimiser.param_groups for part in group["params"]]

    def _gradient(self) -> Iterable[Tensor]:
        """Return the gradient of a minibatch, summed over ranks: this rank's part, or at stage 0 all."""
        optimizer = self._engine.optimizer
        if self._stage == 0:
            return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if isinstance(optimizer, BF16_Optimizer):
            return optimizer.fp32_groups_gradient_flat_partition
        return [part for parts in optimizer.averaged_gradients.values() for part in parts]

    def _over_ranks(self, squares: float) -> float:
        """Return the sum of squares over the whole model, from that of this rank's part."""
        return float(self.all_reduce_sum(np.array([squares]))[0]) if self._stage else squares

    def _remember(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        """Keep copies before an update. At stage 3 the optimiser steps through this rank's parts one after another."""
        self._before = [part.detach().clone() for group in optimiser.param_groups for part in group["params"]]

    def _measure(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        after = (part.detach() for group in optimiser.param_groups for part in group["params"])
        self._change += sum_of_squares(now - then for now, then in zip(after, self._before, strict=True))
        self._before = []

    # -- set-up ------------------------------------------------------------------------------------------------

    def _module(self, weights: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> PolicyModule | TransformersPolicy:
        parameters = {name: nn.Parameter(weights[name].detach().clone()) for name in self.shapes}
        parameters |= {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in frozen.items()}
        if self.spec.transformers is None:
            return PolicyModule(
                self.spec,
                parameters,
                dtype=self.dtype,
                temperature=self.temperature,
                checkpoint_activations=self.training.checkpoint_activations,
                lora_scale=self.lora_scale,
            )
        if self.dtype != torch.float32 and not self._mixed:
            raise ConfigError(
                f"training.zero_stage: must be at least 1 with training.dtype={self.training.dtype} for a model that "
                "transformers' modules run, whose layers don't round model weights themselves, got 0"
            )
        module = self._transformers_policy(whole=self._stage == 3)
        module.dtype = self.dtype
        module.install(parameters)
        return module

    def _wrapped(self, module: PolicyModule | TransformersPolicy) -> Any:
        """Wrap the module in DeepSpeed's engine."""
        settings = self._settings()
        _start(self.device)
        if self._mixed:
            module.to(module.dtype)
        if self._stage == 3:  # one parameter at a time: no device ever holds all of them
            deepspeed.zero.Init(module=module, mem_efficient_linear=False, config_dict_or_path=settings)
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=self._optimiser, config=settings, dist_init_required=False
        )
        return engine

    def _settings(self) -> dict[str, Any]:
        bucket = min(_BUCKET, self.spec.parameters)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # required, but unused: DeepSpeed cuts no batches here
            "gradient_clipping": 0.0,
            "communication_data_type": "fp32",
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self._stage,
                "overlap_comm": self.device.type == "cuda",
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_param_persistence_threshold": 0,  # gather small parameters with their layer
            },
        }
        if self._mixed:
            settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        return settings

    def _start_moments(self) -> None:
        for part in self._parts():
            moments = {moment: torch.zeros_like(part, requires_grad=False) for moment in MOMENTS}
            self._optimiser.state[part] = {"step": torch.zeros((), device=part.device), **moments}
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()  # by default at the first step


def _start(device: torch.device) -> None:
    """Set up the process for DeepSpeed, which needs a process group, even of one rank, and a local rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # names of collectives
    # Offer none of DeepSpeed's operators: it would compile one for collectives at once.
    deepspeed.ops.__compatible_ops__ = {}  # type: ignore[attr-defined]
    os.environ.setdefault("LOCAL_RANK", "0")  # a process sees only its own GPU
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
