"""Time model of accelerators: decode steps, prefill, training and weight transfer.

A decode step reads the model weights and all cached keys and values once, or computes if that takes longer. With tensor
parallelism it adds two all-reduces per layer. A fitted constant, equal for all models and batches, covers the remaining
time. Prefill and training are bound by compute. All quantities are real tokens and emulated seconds; `Pace` converts
emulated to real time.

Sources. Accelerators: NVIDIA's data sheets, SXM where there is a choice; the H800 is the H100 with slower links.
Models: config.json of Qwen2.5 and DeepSeek-R1-Distill-Qwen. Origin of the free parameters: docs/emulation.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from areal_core.config.fields import require
from areal_core.config.groups import EmulationConfig
from areal_core.models.spec import ModelSpec

_BYTES = 2  # bytes per weight, KV cache entry and activation: half precision
_ALL_REDUCES = 2  # per layer: after attention, and after the MLP
_TRAINED_PASSES = 4  # forward, recomputed forward for the backward pass, and backward as two
_CATCH_UP_S = 0.05  # most real seconds of delay that are made up for


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Data sheet of one device, in the units of data sheets."""

    tflops: float  # bf16, dense
    float32_tflops: float  # without TF32
    memory_gb_per_s: float
    memory_gb: float
    link_gb_per_s: float  # to the other devices of its machine, one way


ACCELERATORS = {
    "a100": Accelerator(312, 19.5, 2039, 80, 300),
    "h100": Accelerator(989, 67, 3350, 80, 450),
    "h800": Accelerator(989, 67, 3350, 80, 200),
    "h200": Accelerator(989, 67, 4800, 141, 450),
    "l40s": Accelerator(362, 91.6, 864, 48, 32),
}


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Compute and memory traffic of a Qwen2, Qwen3 or Llama decoder."""

    spec: ModelSpec

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a forward pass per token without attention; embedding look-ups are free."""
        return 2.0 * self._matrices

    @property
    def attention_flops(self) -> float:
        """FLOPs of a forward pass for one pair of a token and a token that it attends to."""
        return 4.0 * self.spec.layers * self.spec.heads * self.spec.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in the KV cache."""
        return 2 * self.spec.layers * self.spec.kv_heads * self.spec.head_dim * _BYTES

    @property
    def weight_bytes(self) -> int:
        return self.spec.parameters * _BYTES

    @property
    def read_bytes(self) -> int:
        """Bytes of model weights that a decode step reads: all matrices, including the output's.
        Looked-up embedding rows, norms and biases are negligible."""
        return self._matrices * _BYTES

    def counted_flops(self, lengths: Sequence[int]) -> float:
        """FLOPs of a forward pass over sequences of these lengths, by AReaL's count for its TFLOP/s.
        Keys and values are as wide as queries, attention has no causal mask, and embeddings cost as much as the output.
        """
        spec, tokens, squares = self.spec, sum(lengths), sum(length * length for length in lengths)
        layer = tokens * (4 * spec.hidden_size**2 + 3 * spec.hidden_size * spec.intermediate_size)
        attention = 2 * squares * spec.hidden_size
        return 2.0 * spec.layers * (layer + attention) + 4.0 * tokens * spec.vocab_size * spec.hidden_size

    @property
    def _matrices(self) -> int:
        """Number of matrix elements that every token is multiplied with."""
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


# From public config.json files. The paper's 1.5B model is distilled, with untied output and embeddings.
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
    """Emulated seconds of the work of a server's replicas, or of a group of training accelerators.
    A replica is `tensor_parallel` accelerators with one model. The `replicas` of a server share its completions evenly
    and decode in lockstep. Raises ConfigError for a model that does not fit."""

    def __init__(self, config: EmulationConfig) -> None:
        self._config = config
        self._device = ACCELERATORS[config.accelerator]
        self.cost = MODELS[config.model]
        degree = config.tensor_parallel
        self._bytes_per_s = degree * config.bandwidth_share * 1e9 * self._device.memory_gb_per_s
        self._flops_per_s = degree * 1e12 * self._device.tflops
        self._all_reduces = _ALL_REDUCES * self.cost.spec.layers if degree > 1 else 0  # all-reduces per decode step
        # A ring all-reduce sends (degree - 1) / degree of the data twice: to reduce, and to gather.
        sent = 2 * (degree - 1) / degree * self.cost.spec.hidden_size * _BYTES  # bytes per sequence
        self._reduced_s = sent / (1e9 * self._device.link_gb_per_s)
        room = degree * config.memory_share * 1e9 * self._device.memory_gb - self.cost.weight_bytes
        self.kv_tokens = config.replicas * int(room // self.cost.kv_bytes)  # tokens in a server's KV caches
        where = f"{degree} x {config.accelerator} (emulation.memory_share={config.memory_share:g})"
        wanted = f"larger, because {config.model} leaves no memory for the KV cache on {where}"
        require(self.kv_tokens >= 1, "emulation.tensor_parallel", wanted, degree)

    def decode_s(self, completions: int, context_tokens: float, steps: int = 1) -> float:
        """Time of `steps` decode steps of `completions` sequences, which first have `context_tokens` in all."""
        mean_context = context_tokens + completions * (steps - 1) / 2  # one more token per completion and step
        sequences, cached = completions / self._config.replicas, mean_context / self._config.replicas
        moved = self.cost.read_bytes + cached * self.cost.kv_bytes
        computed = sequences * self.cost.flops_per_token + cached * self.cost.attention_flops
        busy = max(moved / self._bytes_per_s, computed / self._flops_per_s)
        added = self._all_reduces * (self._config.all_reduce_s + sequences * self._reduced_s)
        return steps * (self._config.decode_overhead_s + busy + added)

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Time to prefill sequences of these lengths: prompts, or sequences whose KV cache was discarded."""
        squares = sum(length * length for length in lengths)
        # Causal: on average a token attends to half of its sequence.
        flops = sum(lengths) * self.cost.flops_per_token + squares / 2 * self.cost.attention_flops
        return flops / (self._config.prefill_share * self._config.replicas * self._flops_per_s)

    def forward_s(self, lengths: Sequence[int], accelerators: int) -> float:
        """Time of a forward pass for the proximal policy over sequences of these lengths."""
        rate = self._config.training_share * 1e12 * self._device.tflops * accelerators
        return self.cost.counted_flops(lengths) / rate

    def train_s(self, lengths: Sequence[int], accelerators: int) -> float:
        """Time of forward and backward passes over these lengths, with activations computed twice."""
        return _TRAINED_PASSES * self.forward_s(lengths, accelerators)

    def transfer_s(self) -> float:
        """Time to transfer new model weights to a replica, each accelerator receiving its part."""
        return self.cost.weight_bytes / (self._config.tensor_parallel * self._config.transfer_bytes_per_s)


def completion_length(config: EmulationConfig, share: float) -> int:
    """The completion length in real tokens at quantile `share`, 0 <= share < 1; log-normal."""
    if share == 0.0:
        return 1
    return max(1, round(config.length_median * math.exp(config.length_sigma * NormalDist().inv_cdf(share))))


class Pace:
    """Converts emulated to real time: `speed` emulated seconds take one real second.
    The accelerator does not wait for this machine, so delays are made up for, within bounds."""

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
        """Start counting from now."""
        self._until = self._clock()

    def spend(self, emulated_s: float) -> None:
        """Sleep until an accelerator would have finished work of `emulated_s` seconds."""
        self._until = max(self._until, self._clock() - _CATCH_UP_S) + emulated_s / self.speed
        left = self._until - self._clock()
        if left > 0:
            self._sleep(left)
