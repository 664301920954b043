"""What does a checkpoint cost the training, and how fast is one of a pretrained model?

    make bench NAME=snapshots ARGS="--runs 3"

Default runs take turns: as configured, with a checkpoint at every step, and with the last checkpoint only.

- `cost_share`: wall time that a checkpoint adds, from the second and third arms, as a share of the time between two
  checkpoints of the default. A background checkpoint takes time from the cores and the disk.
- `blocked_share`: share of time that the trainer of the first arm is blocked by checkpoints. Blocked time is the time
  between the training of a step and what follows, above the median of steps without a checkpoint.
- `s_per_gb`: seconds per GB of a checkpoint of SmolLM2 (135M parameters: weights and two moments in float32), from
  arrays in memory to a committed folder. `raw_s_per_gb`: one file of the same size, written and synced by `dd` on the
  same disk. Both take turns; the figures are medians.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_core.models.spec import ModelSpec, weight_shapes
from areal_core.models.tensorfile import write_tensors
from areal_core.run.launcher import execute, run_folder
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.tracking.timeline import Span, read_timeline
from benchmarks import _harness
from flows.compose import compose

_SMOLLM2 = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000.0,
    rms_eps=1e-5,
    qkv_bias=False,
    tie_embeddings=True,
    context=2048,
    eos_token_ids=(2,),
)
_TURNS = 3


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--runs", type=_harness.positive, default=3, help="default runs")
    options = parser.parse_intermixed_args()
    _harness.report(lambda: {**_training(options.runs, options.overrides), **_pretrained()})


def _training(runs: int, overrides: list[str]) -> dict[str, Any]:
    arms = {
        "default": [],
        "each": ["training.checkpoint_every=1"],
        "never": [f"training.checkpoint_every={_harness.NEVER}"],
    }
    walls: dict[str, list[float]] = {arm: [] for arm in arms}
    blocked: list[float] = []
    every = steps = 0
    with _harness.scratch_runs() as scratch:
        for turn in range(runs + 1):  # the first turn warms up the base model, and does not count
            for arm in _harness.in_turns(list(arms), turn):
                config = compose("cpu-async", [*scratch, f"seed={max(turn, 1)}", *arms[arm], *overrides])
                wall_s = execute(config, run_id=f"{turn}-{arm}", log=_harness.tell).rl_wall_s
                if not turn:
                    continue
                walls[arm].append(wall_s)
                if arm == "default":
                    every, steps = config.training.checkpoint_every, config.training.steps
                    stood_s = _stood_still(read_timeline(run_folder(config, f"{turn}-{arm}").timeline), every)
                    blocked.append(stood_s / wall_s)
    added_s = [(each - never) / (steps - 1) for each, never in zip(walls["each"], walls["never"], strict=True)]
    step_s = statistics.median(walls["never"]) / steps
    return {
        "cost_share": round(statistics.median(added_s) / (every * step_s), 4),
        "added_ms": [round(1000 * seconds, 1) for seconds in added_s],
        "blocked_share": round(statistics.median(blocked), 5),
        "every_steps": every,
        "wall_s": {arm: [round(wall_s, 1) for wall_s in values] for arm, values in walls.items()},
    }


def _stood_still(spans: list[Span], every: int) -> float:
    """Seconds of rank 0 after the training of a step, at steps with a checkpoint, above the median of other steps."""
    own = [span for span in spans if span.process == "trainer-0" and span.kind in ("wait", "recompute", "train")]
    after = {span.step: later.start_s - span.end_s for span, later in itertools.pairwise(own) if span.kind == "train"}
    usual = statistics.median(seconds for step, seconds in after.items() if step is not None and step % every)
    return sum(max(0.0, seconds - usual) for step, seconds in after.items() if step is not None and step % every == 0)


def _pretrained() -> dict[str, Any]:
    made = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {}
    states: dict[str, NDArray[Any]] = {}
    for name, shape in weight_shapes(_SMOLLM2).items():
        weights[f"weight/{name}"] = made.standard_normal(shape, dtype=np.float32)
        for moment in ("exp_avg", "exp_avg_sq"):
            states[f"{moment}/{name}"] = made.standard_normal(shape, dtype=np.float32)
    size_gb = sum(array.nbytes for arrays in (weights, states) for array in arrays.values()) / 1e9
    ours: list[float] = []
    raw: list[float] = []
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as folder:
        storage = Storage.open(f"{folder}/store")
        for turn in range(_TURNS):
            since = time.monotonic()
            files = {name: Path(folder) / name for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)}
            for file, arrays in zip(files.values(), (weights, states), strict=True):
                write_tensors(file, arrays)
            checkpoint.save(storage, turn, files, {})
            ours.append((time.monotonic() - since) / size_gb)
            raw.append(_raw(Path(folder) / "raw", size_gb) / size_gb)
            storage.delete(checkpoint.folder_name(turn, 0))
            _harness.tell(f"round {turn}: {ours[-1]:.2f} s a GB, dd {raw[-1]:.2f} s a GB")
    return {
        "gb": round(size_gb, 2),
        "s_per_gb": round(statistics.median(ours), 2),
        "raw_s_per_gb": round(statistics.median(raw), 2),
        "over_raw": round(statistics.median(one / other for one, other in zip(ours, raw, strict=True)), 2),
    }


def _raw(file: Path, size_gb: float) -> float:
    since = time.monotonic()
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={round(size_gb * 1e9 / 2**22)}", "conv=fdatasync"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - since
    file.unlink()
    return seconds


if __name__ == "__main__":
    main()
