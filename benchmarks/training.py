"""How fast is the trainer on one core beside padding and fixed micro-batches, and what is the overhead of a step?

    python -m benchmarks.training [--rounds 9] [--seeds 1,2,3] [field=value ...]

Speeds are real tokens (no padding) per CPU second of one thread, on a batch of about 8192 tokens, prompts included, in
one minibatch: cutting and packing, forward pass, backward pass and optimiser. Each round measures every arm on another
batch and begins with another arm; ratios are medians of the ratios within a round. All arms start from the same weights
and have the same loss. Before the measurements a check compares their gradients (`_padded_training`,
`_training_offline`).

- `packed_over_padded`, `packed_over_sorted`: the engine of a run, over padding of the batch to its longest sequence,
  and over length-sorted padded micro-batches; both at their fastest micro-batch size. `long_tail`: width 128, 4 layers;
  completions log-normal (median 64, sigma 0.8), truncated at 432, after prompts of 16 tokens. `default`: the default
  model and worked solutions of the default task, which have at most 16 lengths.
- `shared_over_packed`: the same engine with prompts computed once per group, as in a run on a CPU, over packs of
  complete sequences, in tokens of the trajectories; both at their fastest size. `default` as above; `prompt200`: the
  default model, prompts of 200 tokens with 8 completions of 50. `shared_allows` is the limit set by the saved tokens.
- `dynamic_over_fixed`: Algorithm 1 over a constant number of sequences a micro-batch, both within C tokens and packed:
  `long_tail` with C = 512, whose ratio to the longest sequence is that of the paper's 32768 to its 28672, so that the
  constant number can only be 1. Other values of C are beside it. `peak_mib` is the peak memory of an update in a
  process of its own. A fixed number must fit sequences that all have the longest length, and so seldom uses its limit.
  One more ratio is to the fixed number with about the same memory, which cannot be known in advance.
- `overhead_share`: share of a trainer's step outside of forward pass, loss, backward pass and optimiser, without the
  wait for the batch: 1 - sum(time/compute_s) / sum(time/trainer_s) over the steps after the first of real runs of the
  default experiment with `field=value` applied; the median over seeds. Both are wall time: background work of the
  trainer, such as writing a version, uses the same core and counts for the interrupted part.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from areal_core.__main__ import configuration
from areal_core.run.launcher import execute
from benchmarks import _harness
from benchmarks import _training_offline as offline

PAPER_CAPACITY = 512  # of offline.CAPACITIES: to the longest sequence as in the paper

Rounds = Sequence[Mapping[str, float]]  # real tokens by CPU second of each arm, round by round
History = Mapping[str, Mapping[int, float]]  # metric -> step -> value
T = TypeVar("T")


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--rounds", type=_harness.positive, default=9)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    arguments = parser.parse_intermixed_args()
    _harness.report(lambda: measure(arguments.rounds, arguments.seeds, arguments.overrides))


def measure(rounds: int, seeds: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    shares = {seed: overhead_share(_run(seed, overrides)) for seed in seeds}
    _harness.tell(f"overhead share by seed: {shares}")
    for name in offline.SETTINGS | offline.SHARING:
        apart(offline.check, name)
        _harness.tell(f"{name}: all arms have the same gradient")
    speeds = {name: apart(offline.speeds, name, rounds) for name in offline.SETTINGS}
    sharing = {name: apart(offline.sharing, name, rounds) for name in offline.SHARING}
    allowed = {name: apart(offline.saved, name) for name in offline.SHARING}
    cuts = apart(offline.cuts, rounds)
    peaks = {
        f"{how}_{capacity}": round(apart(offline.peak_mib, how, capacity), 1)
        for capacity in offline.CAPACITIES
        for how in ("dynamic", "fixed")
    }
    return figures(speeds, cuts, peaks, shares) | sharing_figures(sharing, allowed)


def sharing_figures(rounds: Mapping[str, Rounds], allowed: Mapping[str, float]) -> dict[str, Any]:
    """Speedup by shared prompts, and its limit by the saved tokens."""
    over = {
        name: ratios(measured, fastest(measured, "shared"), fastest(measured, "packed"))
        for name, measured in rounds.items()
    }
    return {
        "shared_over_packed": {name: _median(values) for name, values in over.items()},
        "shared_allows": {name: round(value, 3) for name, value in allowed.items()},
        "ratios_of_sharing": {name: _rounded(values) for name, values in over.items()},
        "sharing_tokens_per_cpu_s": {name: medians(measured) for name, measured in rounds.items()},
    }


def figures(
    speeds: Mapping[str, Rounds], cuts: Rounds, peaks: Mapping[str, float], shares: Mapping[int, float]
) -> dict[str, Any]:
    """Speedups by packing and by Algorithm 1, and the overhead share of a step."""
    over = {
        name: {
            "padded": ratios(rounds, fastest(rounds, "packed"), "padded"),
            "sorted": ratios(rounds, fastest(rounds, "packed"), fastest(rounds, "sorted_")),
        }
        for name, rounds in speeds.items()
    }
    over_fixed = {capacity: ratios(cuts, f"dynamic_{capacity}", f"fixed_{capacity}") for capacity in offline.CAPACITIES}
    dynamic = f"dynamic_{PAPER_CAPACITY}"
    like_it = alike(peaks, dynamic, "fixed_")
    return {
        "packed_over_padded": _median(over["long_tail"]["padded"]),
        "packed_over_sorted": _median(over["long_tail"]["sorted"]),
        "dynamic_over_fixed": _median(over_fixed[PAPER_CAPACITY]),
        "overhead_share": round(statistics.median(shares.values()), 4),
        "default_packed_over_padded": _median(over["default"]["padded"]),
        "default_packed_over_sorted": _median(over["default"]["sorted"]),
        "dynamic_over_fixed_by_capacity": {capacity: _median(values) for capacity, values in over_fixed.items()},
        f"dynamic_{PAPER_CAPACITY}_over_{like_it}": _median(ratios(cuts, dynamic, like_it)),
        "peak_mib": dict(peaks),
        "overhead_shares": {seed: round(share, 4) for seed, share in shares.items()},
        "ratios": {name: {arm: _rounded(values) for arm, values in arms.items()} for name, arms in over.items()},
        "ratios_over_fixed": {capacity: _rounded(values) for capacity, values in over_fixed.items()},
        "tokens_per_cpu_s": {name: medians(rounds) for name, rounds in (*speeds.items(), ("cuts", cuts))},
    }


def medians(rounds: Rounds) -> dict[str, int]:
    return {arm: round(statistics.median(each[arm] for each in rounds)) for arm in sorted(rounds[0])}


def fastest(rounds: Rounds, prefix: str) -> str:
    """Name of the arm with the best median among those whose names begin with `prefix`."""
    arms = {arm: speed for arm, speed in medians(rounds).items() if arm.startswith(prefix)}
    return max(arms, key=arms.__getitem__)


def alike(peaks: Mapping[str, float], arm: str, prefix: str) -> str:
    """Name of the arm with the peak nearest to that of `arm`, among those whose names begin with `prefix`."""
    return min((other for other in peaks if other.startswith(prefix)), key=lambda other: abs(peaks[other] - peaks[arm]))


def ratios(rounds: Rounds, arm: str, other: str) -> list[float]:
    return [each[arm] / each[other] for each in rounds]


def overhead_share(history: History) -> float:
    """Overhead share of all steps except the first, whose one-time costs do not count."""

    def seconds(key: str) -> float:
        return sum(value for step, value in history[key].items() if step > 1)

    return 1 - seconds("time/compute_s") / seconds("time/trainer_s")


def _run(seed: int, overrides: Sequence[str]) -> History:
    """Metrics of a real run of the default experiment."""
    common = ["name=bench-training", "tracking.enabled=false", f"evaluation.every={_harness.NEVER}", f"seed={seed}"]
    config = configuration({}, [*common, *overrides])
    run_id = f"bench-training-{secrets.token_hex(3)}"
    execute(config, run_id=run_id, log=lambda line: _harness.tell(f"seed {seed}: {line}"))
    return _harness.history(config, run_id)


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a fresh process with one thread."""
    with _harness.processes(1) as pool:
        result = pool.submit(function, *arguments).result()
    _harness.tell(f"{function.__name__}{arguments}: {result}")
    return result


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    main()
