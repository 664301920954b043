"""The time that accelerators would take: decode steps, prefill, training and weight transfer.

A decode step reads the weights and every cached key and value once, or computes for longer than that takes; prefill and
training compute. What a decode step takes beside is a constant, whatever the model and the batch: a residual, fitted.
Everything here is counted in real tokens and emulated seconds; `Pace` turns those into time that passes.

Sources. Accelerators: NVIDIA's data sheets, SXM where there is a choice; the H800 is the H100 with slower links, which
nothing here depends on. Models: config.json of DeepSeek-R1-Distill-Qwen 1.5B, 7B, 14B and 32B. Where the free
parameters come from: docs/emulation.md.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from areal_core.config.schema import EmulationConfig
from areal_core.errors import ConfigError

_BYTES = 2  # of a weight, and of a number in the KV cache: half precision
_CATCH_UP_S = 0.05  # real seconds that a delayed process may make up for


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device's data sheet."""

    flops_per_s: float  # bf16, dense
    float32_flops_per_s: float  # without TF32
    memory_bytes_per_s: float
    memory_bytes: float


ACCELERATORS = {
    "a100": Accelerator(
        flops_per_s=312e12, float32_flops_per_s=19.5e12, memory_bytes_per_s=2.039e12, memory_bytes=80e9
    ),
    "h100": Accelerator(flops_per_s=989e12, float32_flops_per_s=67e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9),
    "h800": Accelerator(flops_per_s=989e12, float32_flops_per_s=67e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9),
    "h200": Accelerator(flops_per_s=989e12, float32_flops_per_s=67e12, memory_bytes_per_s=4.8e12, memory_bytes=141e9),
    "l40s": Accelerator(flops_per_s=362e12, float32_flops_per_s=91.6e12, memory_bytes_per_s=864e9, memory_bytes=48e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen2 decoder with untied embeddings."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 128

    @property
    def parameters(self) -> int:
        return (
            self._matrices + self.layers * (2 * self.hidden_size + self._qkv) + (self.vocab_size + 1) * self.hidden_size
        )

    @property
    def flops_per_token(self) -> float:
        """Of a forward pass, attention left out: looking an embedding up costs nothing."""
        return 2.0 * self._matrices

    @property
    def attention_flops(self) -> float:
        """Of a forward pass, for one token and each token that it attends to."""
        return 4.0 * self.layers * self.heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    @property
    def weight_bytes(self) -> int:
        return self.parameters * _BYTES

    @property
    def read_bytes(self) -> int:
        """What a decode step reads of the weights: the matrices, the output's included. Of embeddings it looks a few
        rows up; norms and biases are nothing."""
        return self._matrices * _BYTES

    @property
    def _qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def _matrices(self) -> int:
        """Numbers that every token is multiplied with."""
        attention = self._qkv + self.heads * self.head_dim
        return self.hidden_size * (self.layers * (attention + 3 * self.intermediate_size) + self.vocab_size)


def _qwen(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int = 152064
) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
    )


MODELS = {
    "qwen-1.5b": _qwen(28, 1536, 12, 2, 8960, 151936),
    "qwen-7b": _qwen(28, 3584, 28, 4, 18944),
    "qwen-14b": _qwen(48, 5120, 40, 8, 13824),
    "qwen-32b": _qwen(64, 5120, 40, 8, 27648),
}


class TimeModel:
    """Emulated seconds of what one replica (`tensor_parallel` accelerators that hold one model) or a group of training
    accelerators does. Raises ConfigError for a model that does not fit."""

    def __init__(self, config: EmulationConfig) -> None:
        self._config = config
        self._device = ACCELERATORS[config.accelerator]
        self.shape = MODELS[config.model]
        degree = config.tensor_parallel
        self._bytes_per_s = degree * config.bandwidth_share * self._device.memory_bytes_per_s
        self._flops_per_s = degree * self._device.flops_per_s
        room = degree * config.memory_share * self._device.memory_bytes - self.shape.weight_bytes
        self.kv_tokens = int(room // self.shape.kv_bytes)  # that the KV cache of a replica holds
        if self.kv_tokens < 1:
            raise ConfigError(
                f"emulation.tensor_parallel: {config.model} does not fit into {degree} x {config.accelerator}"
            )

    def decode_s(self, completions: int, context_tokens: float, steps: int = 1) -> float:
        """`steps` decode steps of `completions` sequences, of `context_tokens` tokens in all at the first step."""
        mean_context = context_tokens + completions * (steps - 1) / 2  # it grows by a token a completion and step
        moved = self.shape.read_bytes + mean_context * self.shape.kv_bytes
        computed = completions * self.shape.flops_per_token + mean_context * self.shape.attention_flops
        busy = max(moved / self._bytes_per_s, computed / self._flops_per_s)
        return steps * (self._config.decode_overhead_s + busy)

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Prefill of sequences of these lengths: prompts, or sequences whose KV cache was discarded."""
        return self._forward_flops(lengths) / (self._config.prefill_share * self._flops_per_s)

    def forward_s(self, lengths: Sequence[int], accelerators: int) -> float:
        """A forward pass of the training accelerators over sequences of these lengths: the proximal policy's."""
        rate = self._config.training_share * self._device.flops_per_s * accelerators
        return self._forward_flops(lengths) / rate

    def train_s(self, lengths: Sequence[int], accelerators: int) -> float:
        """Forward and backward passes over sequences of these lengths: the latter is twice the former."""
        return 3 * self.forward_s(lengths, accelerators)

    def transfer_s(self) -> float:
        """Transfer of new weights to a replica, to each of its accelerators its part."""
        return self.shape.weight_bytes / (self._config.tensor_parallel * self._config.transfer_bytes_per_s)

    def _forward_flops(self, lengths: Sequence[int]) -> float:
        """Causal: on average a token attends to half of its sequence."""
        squares = sum(length * length for length in lengths)
        return sum(lengths) * self.shape.flops_per_token + squares / 2 * self.shape.attention_flops


class CompletionLengths:
    """Lengths of completions, in real tokens: a log-normal distribution, or lengths that were recorded."""

    def __init__(self, config: EmulationConfig) -> None:
        """Raises ConfigError when `lengths_path` is no file of whole numbers."""
        self._median, self._sigma = config.length_median, config.length_sigma
        self._recorded = None if config.lengths_path is None else _recorded(config.lengths_path)

    def quantile(self, share: float) -> int:
        """The length that `share` of the completions stay below; 0 <= share < 1."""
        if self._recorded is not None:
            return self._recorded[int(share * len(self._recorded))]
        if share == 0.0:
            return 1
        return max(1, round(self._median * math.exp(self._sigma * NormalDist().inv_cdf(share))))


@functools.cache
def _recorded(path: str) -> tuple[int, ...]:
    try:
        lengths = sorted(int(word) for word in Path(path).read_text().split())
    except (OSError, ValueError) as error:
        raise ConfigError(f"emulation.lengths_path: can't read whole numbers from {path}: {error}") from error
    if not lengths or lengths[0] < 1:
        raise ConfigError(f"emulation.lengths_path: {path} must hold numbers of at least 1, and one of them")
    return tuple(lengths)


def check_emulation(config: EmulationConfig) -> None:
    """Raise ConfigError for a model that does not fit into its accelerators and for lengths that can't be read."""
    TimeModel(config)
    CompletionLengths(config)


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
