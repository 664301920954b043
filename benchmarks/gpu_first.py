"""Does the CUDA path agree with the CPU, and how fast is it? A short check for a machine with a GPU.

    python -m benchmarks.gpu_first [--parts agree,train,decode] [--tokens 65536]
    python -m benchmarks.gpu_first --device cpu --tiny      # the same code on a CPU; its speeds are meaningless

Each part runs in a process of its own, so that an error of one does not affect the others. A part is sized for less
than 90 seconds on an H100 and killed after 150. It prints one line of JSON with `part`, `revision`, `device`, `torch`,
`dtype` and `seconds`; a failed part adds `error`. The exit status is 1 if a part failed, or if `agree` found a number
outside its bound.

Needs no set-up by make: torch, numpy, numba, safetensors, tokenizers, msgspec and orjson are enough. Where the
sources lie without git, AREAL_REVISION names their revision.

`agree`: a small model of Qwen2's shape with random weights.
- The embedded engine samples on the device. Its weights are swapped in the middle of decoding. `swap_wrong_versions`
  counts tokens with a wrong version, `swap_wrong_weights` those whose log-probability fits the other version better.
- `embedded_*`, `trainer_float32_*` and `trainer_bfloat16_*` are differences of these tokens' log-probabilities from
  those of the training engine on the CPU in float32, nats.
- `kl_*` is the train/inference KL on the device, by the trainer's dtype.
- `update_*` is the relative difference of a training step's update from that of the CPU in float32.
- Bounds are multiples of the dtype's epsilon. `outside` lists what exceeds its bound.

`train`: models of the shapes of Qwen2.5 0.5B and 1.5B with random weights, in bfloat16. A batch is one PPO minibatch of
sequences with short prompts and completions of long-tailed lengths (log-normal, median 1,500 tokens, sigma 0.8, at most
7,680), packed without padding. Every completion has an advantage. Activations of layers are kept (`plain`) or
recomputed in the backward pass (`checkpointed`). The first step of each is not counted.
- `train_tokens_per_s`: all tokens of the batch, prompts included, over the median time of a step (forward, backward and
  optimiser); `proximal_tokens_per_s`: over that of the forward pass for pi_prox; `tokens_per_s`: over both.
- `train_mfu`, `mfu`: model FLOPs of the step, and of step and proximal pass, over time and the data sheet's peak for
  dense bfloat16 (areal_core/training/flops.py); null for a device without a data sheet here.
- `peak_memory_gib`: most memory that torch had allocated, engine included.

`decode`: the embedded engine with the same two models.
- `slots_64`, `slots_256`: `tokens_per_s` of full slots with prompts of 512 tokens. `bandwidth_share`: bytes that a step
  must read (weights, and every cached key and value once) over time and the data sheet's bandwidth.
  `roof_tokens_per_s`: the speed at a share of 1.
- `swap`: seconds to take a bfloat16 version from a file in the page cache to the device. `copy_s`: a plain copy of the
  mapped file. `read_s`, `prepare_s`: the engine's own two stages. `ready_s`: both, and the swap.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import _harness

PARTS = {"agree": "float32, bfloat16", "train": "bfloat16", "decode": "float32"}  # with their dtypes
_LIMIT_S = 150.0  # of a part, which is then killed
_ROOT = Path(__file__).parents[1]


def measured(part: str, options: Sequence[str], device: str) -> dict[str, Any]:
    """Run a part in a process of its own, and return its line of JSON."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks._gpu_parts", part, "--device", device, *options]
    try:
        done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S)
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        result = json.loads(found[-1]) if found else {"error": f"exited with status {done.returncode} and no result"}
    except subprocess.TimeoutExpired:
        result = {"error": f"took longer than {_LIMIT_S:.0f} s"}
    common = {"part": part, "revision": _harness.revision(), "device": device, "torch": version("torch")}
    return common | {"dtype": PARTS[part], "seconds": round(time.perf_counter() - start, 1)} | result


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--parts", type=_harness.some_of(list(PARTS)), default=list(PARTS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--tokens", type=_harness.positive, default=65536, help="tokens in a batch of the part train")
    arguments = parser.parse_args()
    options = ["--tokens", str(arguments.tokens), *(["--tiny"] if arguments.tiny else [])]
    failed = False
    for part in arguments.parts:
        line = measured(part, options, arguments.device)
        print(json.dumps(line), flush=True)
        failed |= "error" in line or bool(line.get("outside"))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
