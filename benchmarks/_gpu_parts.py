"""The parts of `benchmarks.gpu_first`: `python -m benchmarks._gpu_parts PART` runs one and prints its line of JSON."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.errors import ArealError
from areal_core.generation.engines.embedded import Engine
from areal_core.models.folders import ModelSpec, init_weights
from areal_core.models.tensorfile import mapped_tensors
from areal_core.planning.time_model import SPECS, ModelCost
from areal_core.training.batching.partition import Part
from areal_core.training.engines.engine import TrainingBatch, build_batch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.training.flops import data_sheet, peak_flops_per_s, peak_memory_bytes, step_flops
from areal_core.types import Completion, Float32Array, GenerationRequest
from benchmarks import _harness
from tests.support.records import credits_of, group_payload

CPU = torch.device("cpu")
MODELS = {"0.5b": SPECS["0.5b"], "1.5b": SPECS["1.5b-tied"]}
_SMALL = replace(SPECS["0.5b"], vocab_size=1000, hidden_size=256, layers=4, heads=4, head_dim=64, intermediate_size=512)
_TINY = replace(_SMALL, vocab_size=100, hidden_size=64, layers=2, head_dim=16, intermediate_size=128)

# -- train: tokens of sequences
_MEDIAN, _SIGMA, _LONGEST = 1500, 0.8, 7680  # of a completion
_SHORTEST_PROMPT, _LONGEST_PROMPT = 64, 512

# -- agree: bounds, in units of a dtype's epsilon. On a CPU, log-probabilities of this model differ from float64's by a
# mean of 0.7 of them in bfloat16, and of 2.8 in float32, where their own rounding counts too; updates by 2 to 10.
_MEAN, _MAX_OVER_MEAN = 4.0, 8.0
_UPDATE, _UPDATE_FLOAT32 = 32.0, 64.0


@dataclass(frozen=True)
class Size:
    """Amount of work of a part."""

    models: Mapping[str, ModelSpec]  # of `train` and `decode`
    tokens: int  # of a batch of `train`
    microbatch_tokens: int = 8192
    train_steps: int = 3
    agreeing: ModelSpec = _SMALL
    groups: int = 6  # of `agree`, with four completions each
    completion_tokens: int = 64
    slots: tuple[int, ...] = (64, 256)
    group: int = 16  # completions of a prompt of `decode`
    prompt: int = 512
    context: int = 1024
    decode_steps: int = 48
    decode_s: float = 6.0  # no further step after so long


def tiny(tokens: int) -> Size:
    return Size(
        models={"tiny": _TINY},
        tokens=min(tokens, 200),
        microbatch_tokens=600,
        train_steps=1,
        agreeing=_TINY,
        groups=2,
        completion_tokens=24,
        slots=(4, 8),
        group=2,
        prompt=8,
        context=64,
        decode_steps=4,
    )


# -- agree ------------------------------------------------------------------------------------------------------


def agree(size: Size, device: torch.device) -> dict[str, Any]:
    """Compare the engines on the device with the training engine on the CPU in float32."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    spec = size.agreeing
    versions = [_random_weights(spec, seed) for seed in (1, 2)]
    batch, wrong = _across_a_swap(size, versions, device)
    mask = batch.loss_mask
    version = batch.versions[mask]  # [T], as of all that follows

    def passes(device: torch.device, dtype: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log-probabilities under each version, [2, T], and the update of the second by a training step."""
        training = TrainingConfig(
            # A step as smooth in the gradient as the comparison needs, so large that rounding the weights is nothing.
            dtype=dtype, minibatches=1, learning_rate=100.0, adam_eps=1.0,
        )  # fmt: skip
        first, second = (
            TorchEngine(spec, weights, training, AlgorithmConfig(), device=device.type) for weights in versions
        )
        logprobs = np.stack([engine.logprobs(batch)[mask].astype(np.float64) for engine in (first, second)])
        before = _flat(second.weights())
        second.train_step(batch, second.proximal_logprobs(batch))
        return logprobs, _flat(second.weights()) - before

    under, expected_update = passes(CPU, "float32")
    expected, otherwise = np.where(version, under[::-1], under)  # by the version of the token, and by the other
    sampled = batch.behaviour_logprobs[mask].astype(np.float64)
    checks: dict[str, dict[str, float]] = {}

    def check(name: str, value: Any, bound: float) -> None:
        checks[name] = {"value": float(value), "bound": bound}

    def compare(name: str, logprobs: NDArray[np.float64], dtype: str) -> None:
        apart, mean = np.abs(logprobs - expected), _mean_bound(dtype, spec)
        check(f"{name}_mean", apart.mean(), mean)
        check(f"{name}_max", apart.max(), _MAX_OVER_MEAN * mean)

    check("swap_wrong_versions", wrong, 0)
    nearer = np.abs(sampled - expected) < np.abs(sampled - otherwise)
    check("swap_wrong_weights", np.count_nonzero(~nearer), 0)
    compare("embedded", sampled, "float32")
    for dtype in ("float32", "bfloat16"):
        under, update = passes(device, dtype)
        logprobs = np.where(version, under[1], under[0])
        compare(f"trainer_{dtype}", logprobs, dtype)
        quotient = logprobs - sampled
        check(f"kl_{dtype}", (np.expm1(quotient) - quotient).mean(), _mean_bound(dtype, spec) ** 2)
        off = np.linalg.norm(update - expected_update) / np.linalg.norm(expected_update)
        check(f"update_{dtype}", off, _UPDATE * _epsilon(dtype) + _UPDATE_FLOAT32 * _epsilon("float32"))
    outside = [name for name, found in checks.items() if not found["value"] <= found["bound"]]
    return {
        "tokens": len(sampled),
        "tokens_of_versions": np.bincount(version).tolist(),
        "checks": checks,
        "within_bounds": not outside,
        "outside": outside,
    }


def _across_a_swap(
    size: Size, versions: Sequence[Mapping[str, Tensor]], device: torch.device
) -> tuple[TrainingBatch, int]:
    """Sample on the device with the embedded engine, and swap the model weights in the middle.

    Half of the tokens come before the swap and half after it; one group is sampled completely after it. Return the
    batch and the number of tokens with a wrong version."""
    spec, rng, n = size.agreeing, np.random.default_rng(0), 4
    engine = Engine(
        spec,
        versions[0],
        slots=n * (size.groups + 1),
        context=16 + size.completion_tokens,
        device=_engine_device(device),
    )
    requests = [
        GenerationRequest(
            request_id=str(group),
            token_ids=tuple(rng.integers(0, spec.vocab_size, 8 + group % 8).tolist()),
            n=n,
            max_tokens=size.completion_tokens,
            seed=group,
            stop_token_ids=(),
        )
        for group in range(size.groups + 1)
    ]
    *early, late = requests
    for request in early:
        engine.add(request)
    before = size.completion_tokens // 2  # every step samples a token of each completion
    ended = [generation for _ in range(before) for generation in engine.step()]
    engine.swap(engine.prepare(versions[1]), 1)
    engine.add(late)
    while engine.running or engine.waiting:
        ended += engine.step()
    found: dict[str, dict[int, Completion]] = {}
    for generation in ended:
        found.setdefault(generation.request.request_id, {}).update(generation.completions)
    wrong, payloads = 0, {}
    for group, request in enumerate(requests):
        completions = [found[request.request_id][index] for index in range(n)]
        labels = np.arange(size.completion_tokens) >= (before if request in early else 0)
        wrong += sum(int(np.count_nonzero(one.versions != labels)) for one in completions)
        lengths = np.array([len(one.token_ids) for one in completions], np.int32)
        payloads[group] = group_payload(
            np.array(request.token_ids, np.int32),
            lengths,
            tokens=np.concatenate([one.token_ids for one in completions]),
            logprobs=np.concatenate([one.logprobs for one in completions]),
            versions=np.concatenate([one.versions for one in completions]),
        )
    advantages = credits_of(np.tile([1.0, -1.0], (len(requests), n // 2)), list(payloads.values()))
    share = [Part(group, tuple(range(n))) for group in payloads]
    return build_batch(2, [share], payloads, advantages, capacity=4096), wrong


def _random_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Random model weights, made on the CPU so that every device has the same.
    They are large enough to make all tokens differ, and include biases."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.03 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in init_weights(spec, seed).items()
    }


def _flat(weights: Mapping[str, Float32Array]) -> NDArray[np.float64]:
    return np.concatenate([weights[name].ravel() for name in sorted(weights)]).astype(np.float64)


def _epsilon(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def _mean_bound(dtype: str, spec: ModelSpec) -> float:
    """Bound of the mean difference of log-probabilities: passes in `dtype`, results of log(vocabulary) nats in float32.
    The bound of the KL is its square, because k3 of a difference d is about d^2 / 2."""
    return _MEAN * _epsilon(dtype) + 2 * math.log(spec.vocab_size) * _epsilon("float32")


# -- train ------------------------------------------------------------------------------------------------------


def train(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure speed, MFU and memory of training for each model, with activations kept and recomputed."""
    result: dict[str, Any] = {"microbatch_tokens": size.microbatch_tokens}
    for name, spec in size.models.items():
        batch = long_tailed(size.tokens, spec.vocab_size, size.microbatch_tokens)
        result["sequences"], result["tokens"] = len(batch.lengths), int(batch.lengths.sum())
        result["longest"], result["microbatches"] = int(batch.lengths.max()), len(batch.later)
        result[name] = {"parameters": spec.parameters}
        for arm, checkpointed in (("plain", False), ("checkpointed", True)):
            measured = _training(spec, batch, checkpointed=checkpointed, steps=size.train_steps, device=device)
            result[name][arm] = measured
            _harness.tell(f"{name} {arm}: {json.dumps(measured)}")
    return result


def long_tailed(tokens: int, vocab_size: int, capacity: int, seed: int = 0) -> TrainingBatch:
    """A batch of about this many tokens in one minibatch.
    pi_behav is uniform, as it nearly is for a model with random weights."""
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


def _training(
    spec: ModelSpec, batch: TrainingBatch, *, checkpointed: bool, steps: int, device: torch.device
) -> dict[str, Any]:
    _free(device)
    config = TrainingConfig(dtype="bfloat16", checkpoint_activations=checkpointed, minibatches=1, learning_rate=1e-6)
    engine = TorchEngine(spec, init_weights(spec, 0, device.type), config, AlgorithmConfig(), device=device.type)
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


# -- decode -----------------------------------------------------------------------------------------------------


def decode(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure the decoding speed of the embedded engine with each model, and the time to load a version."""
    result: dict[str, Any] = {"prompt_tokens": size.prompt}
    for name, spec in size.models.items():
        weights = init_weights(spec, 0, device.type)
        result[name] = {"parameters": spec.parameters}
        for slots in size.slots:
            result[name][f"slots_{slots}"] = _decoding(size, spec, weights, slots, device)
            _harness.tell(f"{name}, {slots} slots: {json.dumps(result[name][f'slots_{slots}'])}")
        result[name]["swap"] = _swapping(spec, weights, device)
        _harness.tell(f"{name}, swap: {json.dumps(result[name]['swap'])}")
    return result


def _decoding(
    size: Size, spec: ModelSpec, weights: Mapping[str, Tensor], slots: int, device: torch.device
) -> dict[str, Any]:
    _free(device)
    rng = np.random.default_rng(0)
    engine = Engine(spec, weights, slots=slots, context=size.context, device=_engine_device(device))
    for group in range(slots // size.group):
        engine.add(
            GenerationRequest(
                request_id=str(group),
                token_ids=tuple(rng.integers(0, spec.vocab_size, size.prompt).tolist()),
                n=size.group,
                max_tokens=size.context,
                seed=group,
                stop_token_ids=(),
            )
        )

    def step() -> int:
        """Run one step; return the number of sampled tokens."""
        before = engine.stats.generated_tokens
        engine.step()
        return engine.stats.generated_tokens - before

    while step() < slots:  # prompts are prefilled
        pass
    for _ in range(3):
        step()
    first = engine.stats.generated_tokens
    _synchronize(device)
    start, steps = time.perf_counter(), 0
    while steps < size.decode_steps and time.perf_counter() - start < size.decode_s:
        step()
        steps += 1
    _synchronize(device)
    seconds = time.perf_counter() - start
    tokens = engine.stats.generated_tokens - first
    assert tokens == steps * slots, f"{tokens} tokens of {steps} steps of {slots} slots"
    # ModelCost counts half precision; this engine's weights and cache are float32.
    cost, cached = ModelCost(spec), slots * size.prompt + first + tokens / 2
    bytes_per_step = 2 * (cost.read_bytes + cached * cost.kv_bytes)
    sheet = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    bandwidth = sheet and 1e9 * sheet.memory_gb_per_s
    return {
        "tokens_per_s": round(tokens / seconds),
        "step_ms": round(1e3 * seconds / steps, 2),
        "steps": steps,
        "mean_context": round(cached / slots),
        "gb_per_step": round(bytes_per_step / 1e9, 3),
        "bandwidth_share": bandwidth and round(bytes_per_step * steps / seconds / bandwidth, 4),
        "roof_tokens_per_s": bandwidth and round(slots * bandwidth / bytes_per_step),
    }


def _swapping(spec: ModelSpec, weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    _free(device)
    engine = Engine(spec, weights, slots=1, context=16, device=_engine_device(device))
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as folder:
        file = Path(folder, "model.safetensors")
        save_file({name: tensor.bfloat16().cpu() for name, tensor in weights.items()}, file)

        def copy() -> None:
            for array in mapped_tensors(file).values():
                torch.from_numpy(array).to(device, copy=True)

        copy_s = min(_timed(copy, device)[1] for _ in range(2))
        arrays, read_s = _timed(lambda: engine.read(file), device)
        prepared, prepare_s = _timed(lambda: engine.prepare(arrays), device)
        _, swap_s = _timed(lambda: engine.swap(prepared, 1), device)
        return {
            "file_gb": round(file.stat().st_size / 1e9, 3),
            "copy_s": round(copy_s, 3),
            "copy_gb_per_s": round(file.stat().st_size / 1e9 / copy_s, 2),
            "read_s": round(read_s, 3),
            "prepare_s": round(prepare_s, 3),
            "ready_s": round(read_s + prepare_s + swap_s, 3),
        }


# -- all parts --------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Size, torch.device], dict[str, Any]]] = {"agree": agree, "train": train, "decode": decode}


def _engine_device(device: torch.device) -> str:
    """The device with its index. With an index, the embedded engine decodes with torch on a CPU too."""
    return "cpu:0" if device.type == "cpu" else device.type


def _free(device: torch.device) -> None:
    """Free the memory of earlier engines, and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result, and the seconds until the device has finished it."""
    _synchronize(device)
    start = time.perf_counter()
    result = work()
    _synchronize(device)
    return result, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    result: dict[str, Any] = {"device": arguments.device, "torch": torch.__version__}
    try:
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ArealError("--device: must be cpu, as torch finds no CUDA device; add --tiny for a short run")
            result["device"] = torch.cuda.get_device_name(device)
        if arguments.tiny:
            torch.set_num_threads(1)  # two would only wait for each other at this size
        size = tiny(arguments.tokens) if arguments.tiny else Size(MODELS, arguments.tokens)
        result |= PARTS[arguments.part](size, device)
    except Exception as error:  # noqa: BLE001 - whatever it is, the line tells it and the other parts run
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    print(_harness.last_line(result))
    raise SystemExit(int("error" in result))


if __name__ == "__main__":
    main()
