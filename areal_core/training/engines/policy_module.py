"""The policy as a torch module, for engines that partition its parameters: one module for each part of the forward
pass, with the parameters of that part as its own, so that they can be gathered before it runs and released after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from areal_core.models.folders import ModelSpec, check_weights
from areal_core.training.batching.packing import Packed
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
        parameters: Mapping[str, nn.Parameter],
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        checkpoint_activations: bool = False,
        lora_scale: float = 1.0,
    ) -> None:
        """`parameters`: the model's by their names in transformers, and those of an adapter, if there is one."""
        super().__init__()
        check_weights(spec, {name: parameters[name] for name in parameters if ".lora_" not in name})
        self.spec, self.dtype = spec, dtype
        self.checkpoint_activations = checkpoint_activations
        self.named_weights = dict(parameters)
        table = parameters[_EMBEDDING]
        head = table if spec.tie_embeddings else parameters[_HEAD]

        def logprobs(tensors: Mapping[str, Tensor], x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
            hidden = rms_norm(x, tensors["norm"], spec.rms_eps)
            return target_logprobs(tensors["head"], hidden, packed, temperature=temperature)

        self.embedding = _Part(lambda tensors, packed: embed(tensors["table"], packed), {"table": table}, dtype)
        layer = partial(decoder_layer, spec, lora_scale=lora_scale)
        self.layers = nn.ModuleList(
            _Part(layer, layer_weights(parameters, number), dtype) for number in range(spec.layers)
        )
        self.head = _Part(logprobs, {"norm": parameters[_NORM], "head": head}, dtype)

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the completion tokens, each [A], nats."""
        x = self.embedding(packed)
        cos, sin = rotations(self.spec, packed, x)
        checkpoints = self.checkpoint_activations and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (x, cos, sin, packed.blocks)
            x = recomputed(layer, *inputs) if checkpoints else layer(*inputs)
        return self.head(x, packed)


class _Part(nn.Module):
    """A function of some parameters, by their names in it, and of its inputs."""

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.function, self.dtype = function, dtype
        self._attributes = {name: name.replace(".", "_") for name in parameters}  # torch takes no dots
        for name, parameter in parameters.items():
            assert isinstance(parameter, nn.Parameter)
            self.register_parameter(self._attributes[name], parameter)

    def forward(self, *inputs: Any) -> Any:
        tensors = {name: getattr(self, attribute).to(self.dtype) for name, attribute in self._attributes.items()}
        return self.function(tensors, *inputs)
