"""The forward pass with transformers' modules, for models that this package has no pass for.

A micro-batch is cut into padded batches in which no sequence is twice as long as another. If passes are collective, it
stays one batch. The model itself applies a cap, scale or bias to its logits. Padding is on the right.

Axes: N sequences, L tokens of the longest, V vocabulary, A completion tokens (the targets).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal_core.errors import ModelError
from areal_core.models.adapters import adapter_shapes
from areal_core.models.spec import ModelSpec, weight_shapes
from areal_core.training.batching.packing import Packed
from areal_core.training.model.forward import recomputed
from areal_core.types import Lora

_ROWS = 1024  # rows of logits in float32 at once


class _Batch(NamedTuple):
    """Sequences padded on the right."""

    tokens: NDArray[np.int64]  # [N, L]
    mask: NDArray[np.int64]  # [N, L] 1 for a token, 0 for padding
    rows: NDArray[np.int64]  # [A] sequence of each target
    columns: NDArray[np.int64]  # [A] token that predicts it
    targets: NDArray[np.int64]  # [A]


class TransformersPolicy(nn.Module):
    """transformers' module of a model, without model weights until `install`. Dropout is off; buffers stay float32.

    Raises ModelError if transformers has no such causal language model. Also raises it if the module's parameters
    differ from the tensors of the model's files. transformers renames or rearranges some tensors, as in mixtures of
    experts.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        temperature: float = 1.0,
        checkpoint_activations: bool = False,
        whole: bool = False,
        lora: Lora | None = None,
    ) -> None:
        """`whole` keeps a micro-batch in one batch, so that all ranks call every layer equally often.

        `lora` adds peft's adapters to linear layers.
        """
        super().__init__()
        self.temperature = temperature
        self.whole = whole
        self.dtype = torch.float32  # of weights that an engine converts itself
        self.module = _module(spec)
        if lora is not None:
            _add_adapter(self.module, lora)
        self._places = _places(self.module)  # all places of each parameter; a tied one has several
        self._installed: Mapping[str, Tensor] | None = None
        _check_names(spec, {name: parameter.shape for name, parameter in self.named_weights.items()}, lora)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self.module.train(checkpoint_activations)
        if checkpoint_activations:
            try:
                self.module.gradient_checkpointing_enable({"use_reentrant": False})
            except ValueError as error:
                raise ModelError(f"training.checkpoint_activations: {error}") from None

    @property
    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in transformers, each once."""
        return {_plain(name): parameter for name, parameter in self.module.named_parameters()}

    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors themselves, not copies, in all later passes.

        Gradients reach them only if no others are installed before the backward pass.
        """
        if weights is self._installed:
            return
        self._installed = weights
        for name, places in self._places.items():
            for module, attribute in places:
                module._parameters[attribute] = weights[name]  # type: ignore[assignment]  # functional_call does so too
        device = next(iter(weights.values())).device
        for module in self.module.modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[attribute] = buffer.to(device)

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the completion tokens, each [A], nats."""
        parts = [self._batch(batch) for batch in _padded(packed, whole=self.whole)]
        logprobs, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
        return logprobs, entropies

    def _batch(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        ids, mask, rows, columns, targets = (torch.from_numpy(values).to(self.module.device) for values in batch)
        first = int(batch.columns.min()) if self._keeps_logits else 0
        kept = {"logits_to_keep": ids.shape[1] - first} if first else {}
        logits = self.module(input_ids=ids, attention_mask=mask, use_cache=False, **kept).logits
        chosen = zip(logits[rows, columns - first].split(_ROWS), targets.split(_ROWS), strict=True)
        parts = [recomputed(_logprobs, *part, self.temperature) for part in chosen]
        stacked = torch.cat(parts, dim=1)
        return stacked[0], stacked[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TransformersPolicy:
        """As in torch, but buffers keep their precision: rotary angles in half precision are off by degrees."""
        before = {id(module): dict(module._buffers) for module in self.modules()}
        super()._apply(fn, recurse)
        for module in self.modules():
            for name, buffer in before[id(module)].items():
                moved = module._buffers[name]
                if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                    module._buffers[name] = buffer.to(moved.device)
        return self


def _module(spec: ModelSpec) -> PreTrainedModel:
    assert spec.transformers is not None
    fields = json.loads(spec.transformers.config)
    kind = fields.get("model_type")
    try:
        config = CONFIG_MAPPING[kind].from_dict(fields)
        for name, value in fields.items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(config, name, 0.0)
        with no_init_weights():
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(
            f"architectures: {spec.architecture} (model_type {kind!r}) is not a causal language model of transformers: "
            f"{str(error).splitlines()[0]:.200}"
        ) from error
    module.tie_weights()
    return module


def _places(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for part in module.modules():
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((part, attribute))
    return places


def _add_adapter(module: PreTrainedModel, lora: Lora) -> None:
    from peft import LoraConfig, inject_adapter_in_model  # an import of seconds

    alpha: Any = lora.alpha  # peft's annotation says int
    settings = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(lora.targets), lora_dropout=0.0)
    inject_adapter_in_model(settings, module)


def _plain(name: str) -> str:
    """Return a parameter's name without peft's additions."""
    return (
        name.replace(".base_layer.", ".")
        .replace(".lora_A.default.", ".lora_A.")
        .replace(".lora_B.default.", ".lora_B.")
    )


def _check_names(spec: ModelSpec, parameters: Mapping[str, tuple[int, ...]], lora: Lora | None) -> None:
    wanted = weight_shapes(spec) | ({} if lora is None else adapter_shapes(spec, lora))
    for name in sorted(wanted.keys() | parameters.keys()):
        stored, needed = wanted.get(name), tuple(parameters[name]) if name in parameters else None
        if stored != needed:
            raise ModelError(
                f"{name}: must have equal shapes in the model's files and in transformers' {spec.architecture}, "
                f"got {_shape(stored)} and {_shape(needed)}; this model can't be trained"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else str(list(shape))


def _padded(packed: Packed, *, whole: bool) -> Iterator[_Batch]:
    """Cut a micro-batch into padded batches."""
    assert all(block.prompt is None for block in packed.blocks), "transformers' modules do not support shared prompts"
    row = 0
    for _, members in groupby(packed.blocks, key=lambda block: whole or block.tokens.bit_length()):
        blocks = list(members)
        lengths = np.repeat([block.tokens for block in blocks], [block.sequences for block in blocks])
        starts = row + np.cumsum(lengths) - lengths
        end = int(starts[-1] + lengths[-1])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros(mask.shape, np.int64)
        tokens[mask] = packed.inputs[row:end]
        chosen = slice(*np.searchsorted(packed.rows, (row, end)))
        rows = packed.rows[chosen]
        of = np.searchsorted(starts, rows, side="right") - 1
        yield _Batch(tokens, mask.astype(np.int64), of, rows - starts[of], packed.targets[chosen])
        row = end


def _logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probability of each target and entropy of softmax(logits / temperature). [A, V] -> [2, A]."""
    logits = logits.float() / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    entropy = normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)
    return torch.stack((logprobs, entropy))
