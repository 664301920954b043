"""The bottleneck report of a run: how long each role worked and waited, and how much faster the run could have been.

`usage` adds up the spans of the processes' timelines (areal_core.tracking.timeline). `describe_bottleneck` applies one
rule: a role that works a share u of the time could sustain 1 / u times the throughput. So the role with the largest
share is the bottleneck, and the role with the next share limits the speed-up from removing it. Without idle time the
run would have been 1 / u times as fast. Where generation and training share cores, the cores are the resource, and
roles have shares of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from areal_core.config.schema import RunConfig
from areal_core.planning import split
from areal_core.tracking.timeline import Span

_BUSY = 0.9  # share of the time: a role that works less has spare capacity
_WORK = ("generate", "recompute", "train")
_NAMES = {
    "generation": "generation",
    "trainer": "training",
    "rewards": "rewards",
    "evaluator": "evaluation",
    "controller": "the controller",
}
_SERVES = {"evaluation": "evaluator"}  # role -> role that it works for


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Work and wait times of every role between two moments of a run; roles are those in process names."""

    wall_s: float
    processes: Mapping[str, Set[str]]
    seconds: Mapping[tuple[str, str], float]  # (role, kind) -> seconds of all its processes (timeline.KINDS)
    cpu_s: Mapping[str, float]  # on the run's own cores; the publisher counts as trainer
    occupied: float  # share of devices x time with work

    def share(self, role: str, *kinds: str) -> float:
        """Share of the time of all processes of a role that they spent on these kinds; 0 for an absent role."""
        if role not in self.processes:
            return 0.0
        return sum(self.seconds.get((role, kind), 0.0) for kind in kinds) / (len(self.processes[role]) * self.wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The bottleneck of a run, between its first and its last published version."""

    text: str  # bottleneck report, one paragraph
    idle: dict[str, float]  # role (generation, trainer) -> share of the time without work


def explain(
    config: RunConfig, spans: Sequence[Span], curves: split.Curves, *, start_s: float, controller_cpu_s: float
) -> Explanation | None:
    """The bottleneck report of a run from its first to its last version; None without two versions.
    The time before the first version is left out, because some roles have no work then. `start_s` is the start of the
    run, in seconds since the Unix epoch. `controller_cpu_s` is the controller's CPU time since then."""
    published = [span.end_s for span in spans if span.kind == "publish" and span.end_s > start_s]
    if len(published) < 2:
        return None
    first, last = min(published), max(published)
    cpu_s = controller_cpu_s * (last - first) / (last - start_s)
    counted = usage(spans, config, start_s=first, end_s=last, controller_cpu_s=cpu_s)
    rates = split.rates(config, curves)
    used, advice = (split.generation_used(config, rates), split.advice(config, rates)) if rates else (None, None)
    text = " ".join(filter(None, (describe_bottleneck(counted, config, used=used), advice)))
    idle = {role: 1.0 - counted.share(role, *_WORK) for role in ("generation", "trainer") if role in counted.processes}
    return Explanation(text=text, idle=idle)


def usage(
    spans: Sequence[Span], config: RunConfig, *, start_s: float, end_s: float, controller_cpu_s: float = 0.0
) -> Usage:
    """Work and wait times of each role between `start_s` and `end_s`, in seconds since the Unix epoch.
    Spans that cross an edge count in part."""
    processes: defaultdict[str, set[str]] = defaultdict(set)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    cpu_s = defaultdict(float, controller=controller_cpu_s)
    for span in spans:
        inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        if inside_s <= 0:
            continue
        role = _SERVES.get(span.role, span.role)
        processes[role].add(span.process)
        seconds[role, span.kind] += inside_s
        # Reward workers of other machines have cores that `launch.devices` does not count.
        if span.role != "rewards" or int(span.process.rpartition("-")[2]) < config.rollout.reward_workers:
            cpu_s[role] += inside_s / (span.end_s - span.start_s) * (span.cpu_s or 0.0)
    return Usage(
        wall_s=end_s - start_s,
        processes=processes,
        seconds=seconds,
        cpu_s=cpu_s,
        occupied=occupied(spans, config, start_s=start_s, end_s=end_s),
    )


def occupied(spans: Sequence[Span], config: RunConfig, *, start_s: float, end_s: float) -> float:
    """Share of devices x time in which a generation server or a rank was busy, between two moments.

    At each moment, the number of busy devices is that of processes that generate, recompute or train, limited by
    `launch.devices`. Waiting, and being paused for an update, are not busy. An emulated trainer counts for all of its
    ranks.
    """
    devices = {"generation": 1.0, "trainer": config.training_ranks / config.trainer_processes}  # devices per process
    edges: list[tuple[float, float]] = [(start_s, 0.0), (end_s, 0.0)]  # (time, change of the number of busy devices)
    for span in spans:
        more = devices.get(span.role)
        if more and span.kind in _WORK and span.start_s < end_s and span.end_s > start_s:
            edges += [(max(span.start_s, start_s), more), (min(span.end_s, end_s), -more)]
    busy = busy_s = 0.0
    for (at, more), (then, _) in pairwise(sorted(edges)):
        busy += more
        busy_s += min(busy, config.launch.devices) * (then - at)
    return busy_s / (config.launch.devices * (end_s - start_s))


def describe_bottleneck(usage: Usage, config: RunConfig, *, used: float | None = None) -> str:
    """The bottleneck of a run of `config`, as one paragraph.
    `used` is the generated share of what the servers could have generated (areal_core.planning.split), or None."""
    if config.launch.accelerator == "cpu" and not config.emulated:
        sentences = _of_cores(usage, config)
    elif config.max_staleness:
        sentences = _of_stages(usage, config, used)
    else:
        sentences = _of_turns(usage, config)
    return " ".join(filter(None, sentences))


def _of_cores(usage: Usage, config: RunConfig) -> Iterator[str]:
    """Report for generation and training on shared cores: how busy the cores were, by role."""
    cores = config.launch.devices
    used = {role: usage.cpu_s.get(role, 0.0) / (cores * usage.wall_s) for role in _NAMES}
    total = sum(used.values())
    busy = max(usage.occupied, min(1.0, total))  # other roles work when generation and training do not
    largest = max(used, key=used.__getitem__)
    bottleneck = "cores" if busy >= _BUSY else "staleness" if config.max_staleness else "turns"
    relieved = 1 / max(busy * (1 - used[largest] / total), 1e-9) if total else 1.0
    by_role = [f"{_NAMES[role]} ({_percent(share)})" for role, share in _largest_first(used) if share > 0]
    yield f"{_CAUSES[bottleneck]} limited this run."
    yield f"It had work for {_count(cores, 'core')} during {_percent(busy)} of {usage.wall_s:.1f} s."
    yield f"It used {_percent(total)} of their time: {_listed(by_role)}."
    yield _waits(usage)
    yield (
        f"Upper bounds on the speed-up: {1 / busy:.2f}x if the cores always had work, {relieved:.2f}x if "
        f"{_NAMES[largest]} took no time."
    )
    yield _remedy(bottleneck, config)


def _of_stages(usage: Usage, config: RunConfig, used: float | None) -> Iterator[str]:
    """Report for generation and training at the same time, on separate devices."""
    generating, training = usage.share("generation", "generate"), 1.0 - usage.share("trainer", "wait")
    shares = {
        "generation": generating if used is None else used,
        "training": training,
        "rewards": usage.share("rewards", "score"),
    }
    (first, busy), (second, next_busy), _ = _largest_first(shares)
    bottleneck = first if busy >= _BUSY else "staleness"
    room = "" if used is None else f", at {_percent(used)} of their full rate"
    yield f"{_CAUSES[bottleneck]} limited this run of {_duration(usage, config)}."
    recomputing = f"{_percent(usage.share('trainer', 'recompute'))} on proximal log-probabilities"
    yield f"{_count(config.training_ranks, 'rank')} worked {_percent(training)} of the time ({recomputing})."
    yield f"{_count(config.generation_servers, 'server')} generated {_percent(generating)} of the time{room}."
    yield f"Scoring took {_percent(shares['rewards'])}."
    yield _waits(usage)
    bounds = f"Upper bounds on the speed-up: {1 / busy:.2f}x without idle time"
    if bottleneck == "staleness":
        yield f"{bounds}."
    else:
        yield f"{bounds}, {1 / max(next_busy, 1e-9):.2f}x with more capacity for {first}."
        yield f"Then {second} would limit the run."
    yield _remedy(bottleneck, config)


def _of_turns(usage: Usage, config: RunConfig) -> Iterator[str]:
    """Report for generation and training in turn, on the same devices."""
    generating, training = usage.share("generation", "generate"), usage.share("trainer", "recompute", "train")
    busy = min(1.0, generating + training)
    first = "generation" if generating >= training else "training"
    relieved = 1 / max(busy - max(generating, training), 1e-9)
    yield f"{_CAUSES['turns']} limited this run of {_duration(usage, config)}."
    yield (
        f"Devices generated {_percent(generating)} of the time (including the wait for the longest completion of each "
        f"batch), trained {_percent(training)} and were idle {_percent(1 - busy)}."
    )
    yield f"Upper bounds on the speed-up: {1 / busy:.2f}x without idle time, {relieved:.2f}x if {first} took no time."
    yield _REMEDIES["turns"]


_CAUSES = {
    "cores": "The CPU cores",
    "generation": "Generation",
    "training": "Training",
    "rewards": "Scoring",
    "staleness": "The staleness bound",
    "turns": "Synchronous mode",
}
_REMEDIES = {
    "cores": "More cores would help (launch.devices).",
    "generation": "More devices for generation would help.",
    "training": "More devices for training would help (training.ranks).",
    "rewards": "More reward workers would help (rollout.reward_workers, or other machines).",
    "staleness": "A larger rollout.max_staleness would help.",
    "turns": "mode=async generates and trains at the same time.",
}


def _remedy(bottleneck: str, config: RunConfig) -> str:
    if bottleneck == "staleness" and config.pipeline_depth < config.max_staleness:
        return "A larger rollout.pipeline_depth would help."
    return _REMEDIES[bottleneck]


def _waits(usage: Usage) -> str:
    """Two sentences on the waits of ranks and servers, as shares of the time."""
    return (
        f"Ranks waited {_percent(usage.share('trainer', 'wait'))} of the time for a batch. Servers waited "
        f"{_percent(usage.share('generation', 'wait'))} for requests and "
        f"{_percent(usage.share('generation', 'update'))} for new model weights."
    )


def _duration(usage: Usage, config: RunConfig) -> str:
    if config.emulated:
        return f"{usage.wall_s * config.emulation.speed:.0f} emulated seconds"
    return f"{usage.wall_s:.1f} s"


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _largest_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
