# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""One data-parallel rank of TRL's GRPOTrainer, in TRL's own virtual environment: reads a job, trains, writes a report.

    .venv-trl/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/peers/trl_grpo.py job.json

`benchmarks.trl` starts it, chooses its arguments and scores its versions.

How TRL was tuned, with TRL 1.16.0 and transformers 5.23.0 on two cores of an AMD EPYC with AVX-512. Seconds are CPU
seconds of one thread on a busy machine. "Generation" is a rank's share of a step, 256 completions of the embedded model
after training, 64 of SmolLM2-135M; a "pass" is forward and backward of a rank's share of one of four minibatches, 64
and 16.

- Layout: two ranks of one thread, a core each. Embedded: a step took 3.0 to 3.2 s a rank; one process of two threads
  6.6 to 6.9 s in all, and 2 to 3 times the wall time under the same load. SmolLM2: 109 to 126 s a rank, 217 to 252 s in
  all; one process of two threads 261 s, and at a lower load no less wall time.
- Attention: sdpa. Embedded: generation 0.80, pass 0.24; eager 0.84 and 0.28. SmolLM2: 21.4 and 11.6; 22.3 and 11.8.
- KV cache: dynamic. Embedded: generation 0.80; static 0.91 to 1.00. SmolLM2: 21.4; static 19.7, 1 % of a step.
- Engine: `generate` with a rank's whole share at once, 0.80; continuous batching 2.7, with 2048 blocks 4.6 (embedded).
- Precision: float32, as in this system. Embedded: pass 0.24; with bfloat16 autocast 0.49 to 0.54, and generation no
  faster. SmolLM2: bfloat16 autocast is faster on a CPU with AVX512-BF16, pass 6.9 instead of 11.6, generation 12.8
  instead of 21.4: it would halve a step at best, where this comparison is of equal precision.
- Micro-batch: a minibatch at once. Embedded: a pass took 0.23 to 0.25 with 64, 32 and 8 alike, a step 3.6 instead of
  3.0 to 3.2 with two of 32: TRL reads the generation batch from the data set again for each. SmolLM2: 6.1 s for 8
  completions, 11.6 for 16, 27.2 for 32, which would be accumulated from 16 at no gain.
- torch.compile: off. Embedded: it made a pass 18 % faster, 0.2 s a step, and took 20 s a rank, which 25 steps don't
  bring back.
- Off, as they cost time and are not needed here: checkpointing of activations, logging, saving, progress bars, data
  workers, pinned memory, the broadcast of buffers.
- Its processes have the same environment as ours: malloc thresholds, OpenMP threads that wait without spinning.

Where versions are scored, weights are copied in memory after each step and written at the end: 0.16M parameters, well
under a millisecond a step. Not tried: generation by vLLM, and with it TRL's asynchronous trainer, which are made for
GPUs; with SmolLM2, torch.compile and continuous batching.

Properties of TRL that no argument changes: every completion of a rank is padded to the longest in both generation (a
finished completion keeps its row until the last one has ended) and training; log-probabilities of the sampling policy
come from one more forward pass, as those of the proximal policy do in this system; advantages are divided by the sample
standard deviation + 1e-4; minibatches are cut by completions, not by groups; completions whose advantage is zero are
recomputed and trained on like all others, while this system leaves them out. `loss_type="dapo"` is the sum over tokens
divided by the number of tokens of an average minibatch, the closest to the normalisation of this system.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from verifiers import VERIFIERS

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch")


class Stopwatch(TrainerCallback):
    """Records wall and CPU time after every generation batch, and model weights on request.
    Copies stay in memory and are written at the end."""

    def __init__(self, model: torch.nn.Module, updates: int, *, keep: bool) -> None:
        self._model = model
        self._updates = updates  # optimiser steps a generation batch
        self._keep = keep
        self._start = self._cpu_start = 0.0
        self.elapsed_s: list[float] = []
        self.cpu_s: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            self.elapsed_s.append(time.perf_counter() - self._start)
            self.cpu_s.append(time.process_time() - self._cpu_start)
            if self._keep:
                self.weights.append({name: tensor.detach().clone() for name, tensor in self._model.named_parameters()})


class Reward:
    """The verifier's score of a finished completion; 0 for a truncated one, as in this system."""

    def __init__(self, eos_token_id: int, verify: Callable[[str, str], float]) -> None:
        self._eos = eos_token_id
        self._verify = verify
        self.means: list[float] = []  # of this rank's share, one a generation batch

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
    ) -> list[float]:
        rewards = [
            self._verify(text, gold) if ids[-1] == self._eos else 0.0
            for text, ids, gold in zip(completions, completion_ids, answer, strict=True)
        ]
        self.means.append(sum(rewards) / len(rewards))
        return rewards


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["LOCAL_RANK"])
    cores = job["cores"][rank]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    reward = Reward(tokenizer.eos_token_id, VERIFIERS[job["verifier"]])
    stopwatch = Stopwatch(model, job["updates"], keep=job["keep"] and rank == 0)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**job["grpo"]),
        train_dataset=Dataset.from_list([json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]),
        processing_class=tokenizer,
        callbacks=[stopwatch],
    )
    trainer.train()
    write_report(Path(job["out"]), rank, stopwatch, reward)


def write_report(folder: Path, rank: int, stopwatch: Stopwatch, reward: Reward) -> None:
    """Write `report-0.json` for rank 0, and on rank 0 the model weights as `step-000001.safetensors` and so on."""
    for step, weights in enumerate(stopwatch.weights, 1):
        save_file(weights, folder / f"step-{step:06d}.safetensors", {"format": "pt"})
    report = {
        "elapsed_s": stopwatch.elapsed_s,  # since training began, after each step
        "cpu_s": stopwatch.cpu_s,  # of this rank, likewise
        "reward": reward.means,  # of this rank's share of each step
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
