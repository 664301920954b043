"""The forward pass of training on sequences packed without padding.

Linear layers see all tokens of a micro-batch as one matrix. Attention stays within sequences. Log-probabilities and
entropies are float32 at least; everything else has the precision of the model weights.

`completion_logprobs` runs a whole model. `PolicyModule` is the same as a torch module, for engines that partition
parameters. It has one submodule with its own parameters for each part of the pass, so that an engine can gather them
before the part runs and release them afterwards.

Axes: T packed input tokens, A completion tokens (the targets), H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal_core.models.folders import ModelSpec, check_weights, rope_tables
from areal_core.training.batching.packing import Blocks, Packed
from areal_core.training.model.operations import causal_attention, rms_norm, rotate, swiglu

_LOGITS_AT_ONCE = 1 << 22  # elements of the logits in memory at once: they fit into a core's cache
_LOGITS_AT_ONCE_GPU = 1 << 27  # enough rows for an efficient product, half a gigabyte
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def completion_logprobs(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    packed: Packed,
    *,
    temperature: float = 1.0,
    recompute_layers: bool = False,
    lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy of each completion token under softmax(logits / temperature).

    Returns ([A], [A]), nats, in the order of `packed.rows`. Both are differentiable. The backward pass skips an entropy
    that no loss depends on. With `recompute_layers` the graph keeps only the input of each layer. If `weights` have an
    adapter (models.adapters), its linear layers add it times `lora_scale`.
    """
    x = embed(weights["model.embed_tokens.weight"], packed)
    cos, sin = rotations(spec, packed, x)
    for layer in range(spec.layers):
        inputs = spec, layer_weights(weights, layer), x, cos, sin, packed.blocks, lora_scale
        x = recomputed(decoder_layer, *inputs) if recompute_layers else decoder_layer(*inputs)
    head = weights["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    hidden = rms_norm(x, weights["model.norm.weight"], spec.rms_eps)
    return target_logprobs(head, hidden, packed, temperature=temperature)


def recomputed(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Run `layer(*inputs)` with activation checkpointing.

    Only the inputs are kept, and the backward pass recomputes the rest. The gradient is the same, for a third more
    arithmetic and a fraction of the memory. The layer must not draw random numbers.
    """
    output: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def layer_weights(weights: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Return the model weights of one decoder layer, by their names within it ("self_attn.q_proj.weight")."""
    at = f"model.layers.{layer}."
    return {name.removeprefix(at): tensor for name, tensor in weights.items() if name.startswith(at)}


def embed(table: Tensor, packed: Packed) -> Tensor:
    """Embed the inputs. [T, hidden_size]."""
    return F.embedding(torch.from_numpy(packed.inputs).to(table.device), table)


def rotations(spec: ModelSpec, packed: Packed, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the inputs' rotary angles, each [T, 1, D], with dtype and device of `x`."""
    positions = torch.from_numpy(packed.positions).to(x.device)
    tables = rope_tables(spec, packed.context, x.device)
    cos, sin = (table[positions, None].to(x) for table in tables)
    return cos, sin


def decoder_layer(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    blocks: Blocks,
    lora_scale: float = 1.0,
) -> Tensor:
    """Run one decoder layer with weights by their names within it. [T, hidden_size] -> [T, hidden_size]."""

    def linear(name: str, inputs: Tensor) -> Tensor:
        outputs = F.linear(inputs, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        if (down := weights.get(f"{name}.lora_A.weight")) is not None:
            added = F.linear(F.linear(inputs, down), weights[f"{name}.lora_B.weight"])
            outputs = outputs.add(added, alpha=lora_scale)
        return outputs

    normed = rms_norm(x, weights["input_layernorm.weight"], spec.rms_eps)
    query = linear("self_attn.q_proj", normed).unflatten(-1, (spec.heads, spec.head_dim))
    key = linear("self_attn.k_proj", normed).unflatten(-1, (spec.kv_heads, spec.head_dim))
    value = linear("self_attn.v_proj", normed).unflatten(-1, (spec.kv_heads, spec.head_dim))
    if spec.qk_norm:
        query = rms_norm(query, weights["self_attn.q_norm.weight"], spec.rms_eps)
        key = rms_norm(key, weights["self_attn.k_norm.weight"], spec.rms_eps)
    mixed = causal_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, blocks)
    x = x + linear("self_attn.o_proj", mixed.flatten(-2))
    normed = rms_norm(x, weights["post_attention_layernorm.weight"], spec.rms_eps)
    return x + linear("mlp.down_proj", swiglu(linear("mlp.gate_proj", normed), linear("mlp.up_proj", normed)))


def target_logprobs(head: Tensor, hidden: Tensor, packed: Packed, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return `completion_logprobs` from the hidden states after the last norm, [T, hidden_size]."""
    rows, targets = (torch.from_numpy(values).to(hidden.device) for values in (packed.rows, packed.targets))
    hidden = hidden.index_select(0, rows)
    if temperature != 1.0:
        hidden = hidden / temperature  # logits are linear in `hidden`
    logprobs, entropy = _TargetLogprobs.apply(hidden, head, targets)  # type: ignore[misc]
    return logprobs, entropy


class _TargetLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ head.T)[target] and its entropy, for a slice of rows at a time.

    The backward pass recomputes the logits, which are as wide as the vocabulary. It computes the entropy's gradient
    only if needed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = [], [], []
        for rows in _slices(hidden, head):
            logits = _logits(hidden[rows], head)
            normaliser = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, targets[rows, None]).squeeze(-1) - normaliser)
            entropies.append(normaliser - ((logits - normaliser[:, None]).exp_() * logits).sum(-1))
            normalisers.append(normaliser)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, head, targets, torch.cat(normalisers), entropy)
        ctx.set_materialize_grads(False)  # unused outputs then have the gradient None
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        hidden, head, targets, normalisers, entropy = ctx.saved_tensors
        of_logprobs = torch.zeros_like(normalisers) if gradients[0] is None else gradients[0]
        of_entropy = gradients[1]
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = None  # None if the head is frozen
        if ctx.needs_input_grad[1]:
            head_gradient = torch.zeros_like(head, dtype=_at_least_float32(head.dtype))
        for rows in _slices(hidden, head):
            # d logprob / d logits = one_hot(target) - softmax; d entropy / d logits = -softmax (log softmax + entropy)
            scores = _logits(hidden[rows], head).sub_(normalisers[rows, None])
            if of_entropy is None:
                logits_gradient = scores.exp_().mul_(-of_logprobs[rows, None])
            else:
                factors = (scores + entropy[rows, None]).mul_(of_entropy[rows, None]).add_(of_logprobs[rows, None])
                logits_gradient = scores.exp_().mul_(factors.neg_())
            logits_gradient.scatter_add_(-1, targets[rows, None], of_logprobs[rows, None])
            logits_gradient = logits_gradient.to(head.dtype)
            hidden_gradient[rows] = logits_gradient @ head
            if head_gradient is None:
                continue
            if head_gradient.dtype == head.dtype:
                head_gradient.addmm_(logits_gradient.T, hidden[rows])
            else:
                head_gradient += logits_gradient.T @ hidden[rows]
        return hidden_gradient, None if head_gradient is None else head_gradient.to(head.dtype), None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Multiply in the precision of the model weights. The result is at least float32, for sums over the vocabulary."""
    return (hidden @ head.T).to(_at_least_float32(head.dtype))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _slices(hidden: Tensor, head: Tensor) -> list[slice]:
    size = max(1, (_LOGITS_AT_ONCE_GPU if head.is_cuda else _LOGITS_AT_ONCE) // head.shape[0])
    return [slice(start, start + size) for start in range(0, max(1, hidden.shape[0]), size)]


class PolicyModule(nn.Module):
    """A torch module of `completion_logprobs` with its own parameters.

    Passes run in `dtype`, whatever the parameters' dtype. With `checkpoint_activations` only the input of each layer is
    kept for the backward pass.
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
        """`parameters` are those of the model, named as in transformers, and of an adapter, if any."""
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
        """Return log-probability and entropy of the completion tokens, each [A], nats."""
        x = self.embedding(packed)
        cos, sin = rotations(self.spec, packed, x)
        checkpoints = self.checkpoint_activations and torch.is_grad_enabled()
        for layer in self.layers:
            inputs = (x, cos, sin, packed.blocks)
            x = recomputed(layer, *inputs) if checkpoints else layer(*inputs)
        return self.head(x, packed)


class _Part(nn.Module):
    """A function of its own named parameters and of its inputs."""

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.function, self.dtype = function, dtype
        self._attributes = {name: name.replace(".", "_") for name in parameters}  # torch allows no dots
        for name, parameter in parameters.items():
            assert isinstance(parameter, nn.Parameter)
            self.register_parameter(self._attributes[name], parameter)

    def forward(self, *inputs: Any) -> Any:
        tensors = {name: getattr(self, attribute).to(self.dtype) for name, attribute in self._attributes.items()}
        return self.function(tensors, *inputs)
