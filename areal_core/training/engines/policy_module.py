"""The policy as a torch module, for engines that partition its parameters: one module for each part of the forward
pass, with the parameters of that part as its own, so that they can be gathered before it runs and released after it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from areal_core.models.folders import ModelSpec, check_weights
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
        self.spec, self.dtype, self.temperature = spec, dtype, temperature
        self.checkpoint_activations = checkpoint_activations
        self.named_weights = dict(parameters)
        table = parameters[_EMBEDDING]
        self.embedding = _Embedding({"table": table}, dtype)
        self.layers = nn.ModuleList(
            _Layer(layer_weights(parameters, layer), dtype, spec, lora_scale) for layer in range(spec.layers)
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
    def __init__(
        self, parameters: Mapping[str, Tensor], dtype: torch.dtype, spec: ModelSpec, lora_scale: float
    ) -> None:
        super().__init__(parameters, dtype)
        self.spec, self.lora_scale = spec, lora_scale

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, blocks: Blocks) -> Tensor:
        return decoder_layer(self.spec, self.tensors(), x, cos, sin, blocks, self.lora_scale)


class _Head(_Part):
    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype, spec: ModelSpec) -> None:
        super().__init__(parameters, dtype)
        self.spec = spec

    def forward(self, x: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        tensors = self.tensors()
        hidden = rms_norm(x, tensors["norm"], self.spec.rms_eps)
        return target_logprobs(tensors["head"], hidden, packed, temperature=temperature)
