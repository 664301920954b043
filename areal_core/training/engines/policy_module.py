"""The policy as a torch module, for engines that partition its parameters: one module for each part of the forward
pass, with the parameters of that part as its own, so that they can be gathered before it runs and released after it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from areal_core.models.folders import ModelSpec, check_weights, weight_shapes
from areal_core.training.batching.packing import Blocks, Packed
from areal_core.training.model.forward import (
    decoder_layer,
    embed,
    layer_weights,
    recomputed,
    rms_norm,
    rotations,
    target_logprobs,
)

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class PolicyModule(nn.Module):
    """`forward.completion_logprobs` over parameters of its own.

    Passes are in `dtype`, whatever the parameters' is. With `checkpoint_activations` a layer's input is all that is
    kept of it for the backward pass.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        check_weights(spec, weights)
        self.spec, self.dtype, self.temperature = spec, dtype, temperature
        self.checkpoint_activations = checkpoint_activations
        parameters = {name: nn.Parameter(weights[name].detach().clone()) for name in weight_shapes(spec)}
        self.named_weights: dict[str, nn.Parameter] = parameters  # by their names in transformers, each once
        table = parameters[_EMBEDDING]
        self.embedding = _Embedding({"table": table}, dtype)
        self.layers = nn.ModuleList(
            _Layer(layer_weights(parameters, layer), dtype, spec) for layer in range(spec.layers)
        )
        head = table if spec.tie_embeddings else parameters[_HEAD]
        self.head = _Head({"norm": parameters[_NORM], "head": head}, dtype, spec)

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the completion tokens, each [A], nats."""
        x = self.embedding(packed)
        cos, sin = rotations(self.spec, packed, x)
        checkpoints = self.checkpoint_activations and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (x, cos, sin, packed.blocks)
            x = recomputed(layer, *inputs) if checkpoints else layer(*inputs)
        return self.head(x, packed, self.temperature)


class _Part(nn.Module):
    """Some parameters, by their names in the functions of `forward`."""

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._attributes = {name: name.replace(".", "_") for name in parameters}  # torch takes no dots
        for name, parameter in parameters.items():
            assert isinstance(parameter, nn.Parameter)
            self.register_parameter(self._attributes[name], parameter)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, attribute).to(self.dtype) for name, attribute in self._attributes.items()}


class _Embedding(_Part):
    def forward(self, packed: Packed) -> Tensor:
        return embed(self.tensors()["table"], packed)


class _Layer(_Part):
    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype, spec: ModelSpec) -> None:
        super().__init__(parameters, dtype)
        self.spec = spec

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, blocks: Blocks) -> Tensor:
        return decoder_layer(self.spec, self.tensors(), x, cos, sin, blocks)


class _Head(_Part):
    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype, spec: ModelSpec) -> None:
        super().__init__(parameters, dtype)
        self.spec = spec

    def forward(self, x: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        tensors = self.tensors()
        hidden = rms_norm(x, tensors["norm"], self.spec.rms_eps)
        return target_logprobs(tensors["head"], hidden, packed, temperature=temperature)
