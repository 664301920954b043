"""The plain torch engine: float32 weights and AdamW on a CPU or GPU, with a full copy on every rank.

All trained parameters are views into one flat buffer, and so are their gradients. So the all_reduce, the gradient norm
and the optimiser are one operation each, on one tensor.

With training.dtype=bfloat16, passes use a bfloat16 copy of the model weights, renewed after every update. A
micro-batch's bfloat16 gradient is added to the float32 gradient. Weights, gradient and optimiser stay float32, which is
mixed precision (Micikevicius et al., 2017, arXiv 1710.03740). bfloat16 has float32's range, so the loss needs no
scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from areal_core.training.batching.packing import Packed
from areal_core.training.engines.policy_engine import MOMENTS, WEIGHT, PolicyEngine, sum_of_squares, views
from areal_core.types import Float32Array


class TorchEngine(PolicyEngine):
    """Data-parallel engine, with a CPU core or a GPU for each rank.

    On a CPU the same state and batch give bitwise the same weights. On a GPU that needs
    torch.use_deterministic_algorithms, because some sums have no fixed order.
    """

    def _hold(self, weights: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        self.flat = torch.cat([weights[name].detach().float().flatten() for name in self.shapes]).to(self.device)
        self.gradient = torch.zeros_like(self.flat)
        # Model weights for passes and their gradient; in float32 they are the same tensors.
        self._working = self.flat.to(self.dtype)
        self._working_gradient = self.gradient.to(self.dtype)
        self._parameters = views(self._working, self.shapes)
        for name, gradient in views(self._working_gradient, self.shapes).items():
            self._parameters[name].requires_grad_().grad = gradient
        self._frozen = {name: tensor.to(self.device) for name, tensor in frozen.items()}
        self._all = {**self._frozen, **self._parameters}
        self._kept = {WEIGHT: self.flat, **{moment: torch.zeros_like(self.flat) for moment in MOMENTS}}  # by kind
        self._steps = torch.zeros((), device=self.device)
        if self.spec.transformers is not None:
            self._transformers.install(self._all)  # so that unsupported models fail now

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        recompute_layers = self.training.checkpoint_activations and torch.is_grad_enabled()
        return self._logprobs(self._all, packed, recompute_layers=recompute_layers)

    def start_gradient(self) -> None:
        self.gradient.zero_()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        if self._working_gradient is not self.gradient:
            self.gradient += self._working_gradient
            self._working_gradient.zero_()

    def reduce_gradient(self) -> float:
        self.ranks.all_reduce(self.gradient)
        return math.sqrt(sum_of_squares([self.gradient]))

    def apply_gradient(self, rate: float, norm: float) -> float:
        self.gradient.mul_(min(1.0, self.training.grad_clip / (norm + 1e-6)))
        before = self.flat.clone()
        self.step_optimizer(rate)
        self._refresh()
        return math.sqrt(sum_of_squares([before.sub_(self.flat)]))

    def trained(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, tensor.detach()) for name, tensor in self._parameters.items())

    def held(self, kind: str) -> dict[str, Float32Array]:
        copy = self._kept[kind].detach().to("cpu", copy=True)
        return {name: view.numpy() for name, view in views(copy, self.shapes).items()}

    def put(self, kind: str, values: Mapping[str, Tensor]) -> None:
        for name, view in views(self._kept[kind], self.shapes).items():
            view.copy_(values[name])
        self._refresh()

    def step_optimizer(self, rate: float) -> None:
        """Update `flat`, all trained weights end to end, by the clipped `gradient`. Override it for another optimiser.

        AdamW is called as a function: its class imports torch's compiler, which takes seconds.
        """
        config = self.training
        means, squares = (self._kept[moment] for moment in MOMENTS)
        adamw(
            [self.flat],
            [self.gradient],
            [means],
            [squares],
            [],
            [self._steps.fill_(self.updates)],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    def _refresh(self) -> None:
        """Copy the float32 weights to the weights that passes use."""
        if self._working is not self.flat:
            self._working.copy_(self.flat)
