"""The time that accelerators would take: decode steps, prefill, training and weight transfer.

A decode step reads the weights and every cached key and value once, or computes for longer than that takes, and adds
the parts of the accelerators that hold a layer up, twice a layer; prefill and training compute. What a decode step
takes beside is a constant, whatever the model and the batch: a residual, fitted. Everything here is counted in real
tokens and emulated seconds; `Pace` turns those into time that passes.

Sources. Accelerators: NVIDIA's data sheets, SXM where there is a choice; the H800 is the H100 with slower links.
Models: config.json of Qwen2.5 and DeepSeek-R1-Distill-Qwen. Where the free parameters come from:
docs/emulation.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from areal_core.config.schema import EmulationConfig
from areal_core.errors import ConfigError
from areal_core.models.spec import ModelSpec

_BYTES = 2  # of a weight, of a number in the KV cache, and of an activation: half precision
_ALL_REDUCES = 2  # of a layer: after attention, and after the MLP
_TRAINED_PASSES = 4  # forward, again where the backward pass needs activations that were not kept, and backward as two
_CATCH_UP_S = 0.05  # real seconds that a delayed process may make up for


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device's data sheet, in the units of data sheets."""

    tflops: float  # bf16, dense
    float32_tflops: float  # without TF32
    memory_gb_per_s: float
    memory_gb: float
    link_gb_per_s: float  # to the others of its machine, one way


ACCELERATORS = {
    "a100": Accelerator(312, 19.5, 2039, 80, 300),
    "h100": Accelerator(989, 67, 3350, 80, 450),
    "h800": Accelerator(989, 67, 3350, 80, 200),
    "h200": Accelerator(989, 67, 4800, 141, 450),
    "l40s": Accelerator(362, 91.6, 864, 48, 32),
}


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a Qwen2, Qwen3 or Llama decoder of this spec computes and moves."""

    spec: ModelSpec

    @property
    def flops_per_token(self) -> float:
        """Of a forward pass, attention left out: looking an embedding up costs nothing."""
        return 2.0 * self._matrices

    @property
    def attention_flops(self) -> float:
        """Of a forward pass, for one token and each token that it attends to."""
        return 4.0 * self.spec.layers * self.spec.heads * self.spec.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of one token in the KV cache."""
        return 2 * self.spec.layers * self.spec.kv_heads * self.spec.head_dim * _BYTES

    @property
    def weight_bytes(self) -> int:
        return self.spec.parameters * _BYTES

    @property
    def read_bytes(self) -> int:
        """What a decode step reads of the weights: the matrices, the output's included. Of embeddings it looks a few
        rows up; norms and biases are nothing."""
        return self._matrices * _BYTES

    def counted_flops(self, lengths: Sequence[int]) -> float:
        """Of a forward pass over sequences of these lengths, as AReaL counts them for its TFLOP/s: keys and values as
        wide as queries, attention without a causal mask, and embeddings multiplied as the output is."""
        spec, tokens, squares = self.spec, sum(lengths), sum(length * length for length in lengths)
        layer = tokens * (4 * spec.hidden_size**2 + 3 * spec.hidden_size * spec.intermediate_size)
        attention = 2 * squares * spec.hidden_size
        return 2.0 * spec.layers * (layer + attention) + 4.0 * tokens * spec.vocab_size * spec.hidden_size

    @property
    def _matrices(self) -> int:
        """Numbers that every token is multiplied with."""
        spec = self.spec
        attention = 2 * (spec.heads + spec.kv_heads) * spec.head_dim
        return spec.hidden_size * (spec.layers * (attention + 3 * spec.intermediate_size) + spec.vocab_size)


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936 if hidden < 2048 else 152064,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
        rope_theta=1e6,
        rms_eps=1e-6,
        qkv_bias=True,
        tie_embeddings=tied,
        context=32768,
        eos_token_ids=(151643,),
    )


# From their public config.json. The 1.5B of the paper is a distilled one, whose output is not tied to its embeddings.
SPECS = {
    "0.5b": _qwen(24, 896, 14, 2, 4864, tied=True),
    "1.5b": _qwen(28, 1536, 12, 2, 8960),
    "1.5b-tied": _qwen(28, 1536, 12, 2, 8960, tied=True),
    "7b": _qwen(28, 3584, 28, 4, 18944),
    "14b": _qwen(48, 5120, 40, 8, 13824),
    "32b": _qwen(64, 5120, 40, 8, 27648),
}
MODELS = {f"qwen-{size}": ModelCost(SPECS[size]) for size in ("1.5b", "7b", "14b", "32b")}


class TimeModel:
    """Emulated seconds of what the replicas of a server or a group of training accelerators do. A replica is
    `tensor_parallel` accelerators that hold one model; the `replicas` of a server share its completions evenly and
    decode in step. Raises ConfigError for a model that does not fit."""

    def __init__(self, config: EmulationConfig) -> None:
        self._config = config
        self._device = ACCELERATORS[config.accelerator]
        self.cost = MODELS[config.model]
        degree = config.tensor_parallel
        self._bytes_per_s = degree * config.bandwidth_share * 1e9 * self._device.memory_gb_per_s
        self._flops_per_s = degree * 1e12 * self._device.tflops
        self._all_reduces = _ALL_REDUCES * self.cost.spec.layers if degree > 1 else 0  # of a decode step
        # A ring sends all but its own part of a sum around, and then all but its own part of the result.
        self._reduced_s = (
            2 * (degree - 1) / degree * self.cost.spec.hidden_size * _BYTES / (1e9 * self._device.link_gb_per_s)
        )
        room = degree * config.memory_share * 1e9 * self._device.memory_gb - self.cost.weight_bytes
        self.kv_tokens = config.replicas * int(room // self.cost.kv_bytes)  # that the KV caches of a server hold
        if self.kv_tokens < 1:
            raise ConfigError(
                f"emulation.tensor_parallel: {config.model} does not fit into {degree} x {config.accelerator}"
            )

    def decode_s(self, completions: int, context_tokens: float, steps: int = 1) -> float:
        """`steps` decode steps of `completions` sequences, of `context_tokens` tokens in all at the first step."""
        mean_context = context_tokens + completions * (steps - 1) / 2  # it grows by a token a completion and step
        sequences, cached = completions / self._config.replicas, mean_context / self._config.replicas
        moved = self.cost.read_bytes + cached * self.cost.kv_bytes
        computed = sequences * self.cost.flops_per_token + cached * self.cost.attention_flops
        busy = max(moved / self._bytes_per_s, computed / self._flops_per_s)
        added = self._all_reduces * (self._config.all_reduce_s + sequences * self._reduced_s)
        return steps * (self._config.decode_overhead_s + busy + added)

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Prefill of sequences of these lengths: prompts, or sequences whose KV cache was discarded."""
        squares = sum(length * length for length in lengths)
        # Causal: on average a token attends to half of its sequence.
        flops = sum(lengths) * self.cost.flops_per_token + squares / 2 * self.cost.attention_flops
        return flops / (self._config.prefill_share * self._config.replicas * self._flops_per_s)

    def forward_s(self, lengths: Sequence[int], accelerators: int) -> float:
        """A forward pass of the training accelerators over sequences of these lengths: the proximal policy's."""
        rate = self._config.training_share * 1e12 * self._device.tflops * accelerators
        return self.cost.counted_flops(lengths) / rate

    def train_s(self, lengths: Sequence[int], accelerators: int) -> float:
        """Forward and backward passes over sequences of these lengths, activations computed twice."""
        return _TRAINED_PASSES * self.forward_s(lengths, accelerators)

    def transfer_s(self) -> float:
        """Transfer of new weights to a replica, to each of its accelerators its part."""
        return self.cost.weight_bytes / (self._config.tensor_parallel * self._config.transfer_bytes_per_s)


def completion_length(config: EmulationConfig, share: float) -> int:
    """The length, in real tokens, that `share` of the completions stay below; 0 <= share < 1. Lengths are
    log-normal."""
    if share == 0.0:
        return 1
    return max(1, round(config.length_median * math.exp(config.length_sigma * NormalDist().inv_cdf(share))))


class Pace:
    """Lets emulated time pass, `speed` emulated seconds in a real one. The accelerator does not wait for this machine:
    what was spent late is made up for, within bounds."""

    def __init__(
        self,
        speed: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed = speed
        self._clock = clock
        self._sleep = sleep
        self._until = clock()

    def restart(self) -> None:
        """What comes next begins now."""
        self._until = self._clock()

    def spend(self, emulated_s: float) -> None:
        """Return when an accelerator would have finished work of this time."""
        self._until = max(self._until, self._clock() - _CATCH_UP_S) + emulated_s / self.speed
        left = self._until - self._clock()
        if left > 0:
            self._sleep(left)
