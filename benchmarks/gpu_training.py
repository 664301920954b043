"""How fast does the torch engine train on a GPU, and what share of its peak is that?

    python -m benchmarks.gpu_training [--models 0.5b,1.5b] [--tokens 131072] [--microbatch-tokens 8192] [--steps 3]

Needs one CUDA device, in bfloat16; `make bench` leaves it out unless NAME=gpu_training asks for it. Models have the
shapes of Qwen2.5 0.5B and 1.5B and random weights, made on the device. A batch is one PPO minibatch of sequences with
short prompts and completions of long-tailed lengths (log-normal, median 1,500 tokens, sigma 0.8, at most 7,680), packed
without padding; every completion has an advantage. Each model is trained with its layers' activations kept (`plain`)
and recomputed in the backward pass (`checkpointed`), for a step that isn't counted and `--steps` that are:

- `train_tokens_per_s`: all tokens of the batch, prompts included, over the median time of a step (forward, backward and
  optimiser); `proximal_tokens_per_s`: over that of the forward pass for pi_prox; `tokens_per_s`: over both;
- `train_mfu`, `mfu`: model FLOPs of the step, and of step and proximal pass, over time and the data sheet's peak for
  dense bfloat16 (areal_core/training/flops.py); null where there is no data sheet here;
- `peak_memory_gib`: most memory that torch had allocated, engine included.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from areal_core.config.schema import AlgorithmConfig, TrainingConfig
from areal_core.models.folders import ModelSpec, init_weights
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.training.flops import step_flops
from areal_core.training.hardware import peak_flops_per_s, peak_memory_bytes
from benchmarks import _harness

_MEDIAN, _SIGMA, _LONGEST = 1500, 0.8, 7680  # tokens of a completion
_SHORTEST_PROMPT, _LONGEST_PROMPT = 64, 512


def _qwen(layers: int, hidden: int, heads: int, head_dim: int, intermediate: int) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        intermediate_size=intermediate,
        rope_theta=1e6,
        rms_eps=1e-6,
        qkv_bias=True,
        tie_embeddings=True,
        context=32768,
        eos_token_ids=(),
    )


MODELS = {"0.5b": _qwen(24, 896, 14, 64, 4864), "1.5b": _qwen(28, 1536, 12, 128, 8960)}


def long_tailed(tokens: int, vocab_size: int, capacity: int, seed: int = 0) -> TrainingBatch:
    """A batch of about so many tokens, one minibatch; pi_behav is uniform, as a model with random weights nearly is."""
    rng = np.random.default_rng(seed)
    prompts: list[int] = []
    completions: list[int] = []
    while sum(prompts) + sum(completions) < tokens:
        prompts.append(int(rng.integers(_SHORTEST_PROMPT, _LONGEST_PROMPT)))
        longest = min(_LONGEST, capacity - prompts[-1])
        completions.append(int(np.clip(rng.lognormal(np.log(_MEDIAN), _SIGMA), 1, longest)))
    count = len(prompts)
    lengths = np.array(prompts, np.int32) + np.array(completions, np.int32)
    sampled = np.repeat(np.tile([False, True], count), np.stack((prompts, completions), axis=1).ravel())
    return TrainingBatch(
        step=1,
        tokens=rng.integers(0, vocab_size, len(sampled)).astype(np.int32),
        lengths=lengths,
        prompt_lengths=np.array(prompts, np.int32),
        loss_mask=sampled,
        behaviour_logprobs=np.where(sampled, -np.log(vocab_size), 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        advantages=np.where(sampled, np.repeat(rng.choice([-1, 1], count), lengths), 0).astype(np.float32),
        weights=sampled.astype(np.float32),
        denominator_terms=np.array(completions, np.float64),
        minibatches=((), tuple(range(count))),  # not the first, which needs no forward pass for pi_prox
        capacity=capacity,
    )


def measure(
    spec: ModelSpec, batch: TrainingBatch, *, checkpointed: bool, steps: int, device: torch.device
) -> dict[str, Any]:
    """Speed, MFU and memory of training one model with the batch, with or without activation checkpointing."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    config = TrainingConfig(dtype="bfloat16", checkpoint_activations=checkpointed, minibatches=1, learning_rate=1e-6)
    weights = init_weights(spec, 0, device.type)
    engine = TorchEngine(spec, weights, config, AlgorithmConfig(), device=device.type)
    del weights
    proximal_s: list[float] = []
    train_s: list[float] = []
    for _ in range(steps + 1):
        proximal, taken_s = _timed(lambda: engine.proximal_logprobs(batch), device)
        proximal_s.append(taken_s)
        stats, taken_s = _timed(lambda known=proximal: engine.train_step(batch, known), device)
        train_s.append(taken_s)
    proximal_time, train_time = statistics.median(proximal_s[1:]), statistics.median(train_s[1:])
    tokens = int(batch.lengths.sum())
    peak = peak_flops_per_s(device, torch.bfloat16)

    def share(flops: float, seconds: float) -> float | None:
        return None if peak is None else round(flops / seconds / peak, 4)

    return {
        "train_tokens_per_s": round(tokens / train_time),
        "proximal_tokens_per_s": round(tokens / proximal_time),
        "tokens_per_s": round(tokens / (train_time + proximal_time)),
        "train_mfu": share(step_flops(spec, batch, proximal=False, reference=False), train_time),
        "mfu": share(step_flops(spec, batch, proximal=True, reference=False), train_time + proximal_time),
        "train_s": [round(taken, 3) for taken in train_s],
        "proximal_s": [round(taken, 3) for taken in proximal_s],
        "peak_memory_gib": round(peak_memory_bytes(device) / 2**30, 2),
        "grad_norm": round(stats.grad_norm, 4),
    }


def report(
    models: dict[str, ModelSpec], tokens: int, microbatch_tokens: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """All of it, for the last line."""
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "microbatch_tokens": microbatch_tokens,
    }
    for name, spec in models.items():
        batch = long_tailed(tokens, spec.vocab_size, microbatch_tokens)
        result["sequences"], result["tokens"] = len(batch.lengths), int(batch.lengths.sum())
        result["longest"], result["microbatches"] = int(batch.lengths.max()), len(batch.later)
        result[name] = {"parameters": spec.parameters}
        for arm, checkpointed in (("plain", False), ("checkpointed", True)):
            measured = measure(spec, batch, checkpointed=checkpointed, steps=steps, device=device)
            result[name][arm] = measured
            _harness.tell(f"{name} {arm}: {json.dumps(measured)}")
    return result


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--models", type=_harness.some_of(list(MODELS)), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=131072, help="of a batch")
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.microbatch_tokens <= _LONGEST_PROMPT:
        raise SystemExit(
            f"areal: error: --microbatch-tokens: must be more than a prompt, {_LONGEST_PROMPT}, "
            f"got {arguments.microbatch_tokens}"
        )
    if not torch.cuda.is_available():
        raise SystemExit("areal: error: this benchmark needs a CUDA device, and torch sees none")
    chosen = {name: MODELS[name] for name in arguments.models}
    device = torch.device("cuda")
    _harness.report(lambda: report(chosen, arguments.tokens, arguments.microbatch_tokens, arguments.steps, device))


if __name__ == "__main__":
    main()
