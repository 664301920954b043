"""What does a snapshot cost the training, and how fast is one of a pretrained model?

    make bench NAME=snapshots ARGS="--runs 3"

`blocked_share`: of the default run's RL wall time, what the trainer stood still for its checkpoints: what lies between
the end of a step's training and what follows, beyond the median of steps that make none. They are written in the
background; `background_share` adds all of that time, as if it took a core that the training wanted.

`s_per_gb`: a checkpoint of the state of SmolLM2 (135M parameters: weights and two moments in float32), from arrays in
memory to a committed folder, against `raw_s_per_gb`, one file of as many bytes written and synced by `dd` to the same
disk; turns of both, the medians.
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

from areal_core.models.tensorfile import write_tensors
from areal_core.run.launcher import execute, run_folder
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.tracking.timeline import Span, read_timeline
from benchmarks import _harness
from flows.compose import compose

_HIDDEN, _LAYERS, _KV, _INNER, _VOCABULARY = 576, 30, 192, 1536, 49152  # of SmolLM2-135M, whose embeddings are tied
_TURNS = 3


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--runs", type=_harness.positive, default=3, help="default runs")
    options = parser.parse_intermixed_args()
    _harness.report(lambda: {**_training(options.runs, options.overrides), **_pretrained()})


def _training(runs: int, overrides: list[str]) -> dict[str, Any]:
    blocked: list[float] = []
    background: list[float] = []
    every = 0
    for seed in range(1, runs + 1):
        with _harness.scratch_runs() as scratch:
            config = compose("cpu-async", [*scratch, f"seed={seed}", *overrides])
            wall_s = execute(config, run_id="r", log=_harness.tell).rl_wall_s
            every = config.training.checkpoint_every
            spans = read_timeline(run_folder(config, "r").timeline)
        stood_s = _stood_still(spans, every)
        saving_s = sum(span.end_s - span.start_s for span in spans if span.kind == "checkpoint")
        blocked.append(stood_s / wall_s)
        background.append((stood_s + saving_s) / wall_s)
        _harness.tell(f"seed {seed}: {stood_s:.3f} s blocked, {saving_s:.3f} s in the background, of {wall_s:.1f} s")
    return {
        "blocked_share": round(statistics.median(blocked), 5),
        "background_share": round(statistics.median(background), 5),
        "every_steps": every,
    }


def _stood_still(spans: list[Span], every: int) -> float:
    """Seconds of rank 0 after the training of a step, at steps with a checkpoint, beyond the median of the others."""
    own = [span for span in spans if span.process == "trainer-0" and span.kind in ("wait", "recompute", "train")]
    after = {span.step: later.start_s - span.end_s for span, later in itertools.pairwise(own) if span.kind == "train"}
    usual = statistics.median(seconds for step, seconds in after.items() if step is not None and step % every)
    return sum(max(0.0, seconds - usual) for step, seconds in after.items() if step is not None and step % every == 0)


def _pretrained() -> dict[str, Any]:
    made = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {}
    states: dict[str, NDArray[Any]] = {}
    for name, shape in _shapes().items():
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
            _harness.tell(f"turn {turn}: {ours[-1]:.2f} s a GB, raw {raw[-1]:.2f}")
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


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (_VOCABULARY, _HIDDEN), "norm": (_HIDDEN,)}
    for layer in range(_LAYERS):
        for name, shape in {
            "q": (_HIDDEN, _HIDDEN),
            "k": (_KV, _HIDDEN),
            "v": (_KV, _HIDDEN),
            "o": (_HIDDEN, _HIDDEN),
            "gate": (_INNER, _HIDDEN),
            "up": (_INNER, _HIDDEN),
            "down": (_HIDDEN, _INNER),
            "norm_1": (_HIDDEN,),
            "norm_2": (_HIDDEN,),
        }.items():
            shapes[f"{layer}.{name}"] = shape
    return shapes


if __name__ == "__main__":
    main()
