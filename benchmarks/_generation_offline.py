"""Measurements of `benchmarks.generation` without a server, in a process of their own on one core.

A request is a line of JSON on stdin, and its result a line of JSON on stdout:

    generate: transformers' `generate()`, batches for `seconds`
    gemm: floating-point operations per second of one large float32 product
    stage: milliseconds to stage 100M parameters from a file, to swap them in, and to copy as many bytes
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from areal_core.generation.engines.embedded import Engine
from areal_core.models.folders import ModelSpec, init_weights

LARGE = ModelSpec(  # 100M parameters
    architecture="Qwen2ForCausalLM",
    vocab_size=16384,
    hidden_size=768,
    layers=12,
    heads=12,
    kv_heads=12,
    head_dim=64,
    intermediate_size=2112,
    rope_theta=10000.0,
    rms_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    context=512,
    eos_token_ids=(1,),
)
_SIDE = 2048  # of the large product


class Offline:
    def __init__(self, model: Path, scratch: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._eos = list(np.atleast_1d(self._model.generation_config.eos_token_id))
        self._random = random.Random(0)
        self._file = scratch / "large.safetensors"
        self._factors = torch.randn(2, _SIDE, _SIDE)
        self._engine: Engine | None = None

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], group: int, requests: int, max_tokens: int, seconds: float
    ) -> dict[str, Any]:
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens,
            eos_token_id=self._eos, pad_token_id=self._eos[0], use_cache=True,
        )  # fmt: skip
        tokens, start, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() - start < seconds:
            chosen = [prompt for prompt in self._random.sample(prompts, requests) for _ in range(group)]
            width = max(map(len, chosen))
            ids = torch.tensor([[self._eos[0]] * (width - len(prompt)) + prompt for prompt in chosen])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in chosen])
            completions = self._model.generate(ids, attention_mask=mask, generation_config=settings)[:, width:]
            ends = torch.isin(completions, torch.tensor(self._eos)).int()
            tokens += int((ends.cumsum(1) - ends == 0).sum())  # the first end token counts, what follows does not
        return {"tokens": tokens, "wall_s": time.monotonic() - start, "cpu_s": time.process_time() - cpu}

    @torch.inference_mode()
    def gemm(self) -> dict[str, Any]:
        out = torch.empty(_SIDE, _SIDE)
        return {"flops": 2 * _SIDE**3 / _fastest(lambda: torch.mm(*self._factors, out=out), 5)}

    def stage(self) -> dict[str, Any]:
        if self._engine is None:
            large = init_weights(LARGE, 0)
            save_file(large, self._file)
            self._engine = Engine(LARGE, large, slots=1)
        engine, size = self._engine, LARGE.parameters
        prepared = engine.prepare(engine.read(self._file))
        source = np.ones(size, dtype=np.float32)
        return {
            "copy_ms": 1e3 * _fastest(source.copy, 3),
            "swap_large_ms": 1e3 * _fastest(lambda: engine.swap(prepared, 1), 3),
            "stage_ms": 1e3 * _fastest(lambda: engine.prepare(engine.read(self._file)), 3),
        }


def _fastest(call: Any, times: int) -> float:
    seconds: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    offline = Offline(arguments.model, arguments.scratch)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(offline, asked.pop("do"))(**asked)), flush=True)


if __name__ == "__main__":
    main()
