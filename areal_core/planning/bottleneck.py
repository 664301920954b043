"""The bottleneck report of a run: how long each role worked and waited, and how much faster the run could have been.

`account` adds up the spans of the processes' timelines (areal_core.tracking.timeline). `bound` applies one rule: a role
that works a share u of the time could sustain 1 / u times the throughput. So the role with the largest share is the
bottleneck, and the role with the next share limits the speed-up from removing it. Without idle time the run would have
been 1 / u times as fast. Where generation and training share cores, the cores are the resource, and roles have shares
of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from areal_core.config.schema import RunConfig
from areal_core.planning import split
from areal_core.tracking.timeline import Span

Bottleneck = Literal["cores", "generation", "training", "rewards", "staleness", "turns"]

_BUSY = 0.9  # of the time: a role that works for less has room
_TAKEN = 0.25  # of the cores' time, in which work for them did not run: more than waiting for files explains
_WORK = ("generate", "recompute", "train")
_NAMES = {
    "generation": "generation",
    "trainer": "training",
    "rewards": "rewards",
    "evaluator": "evaluation",
    "controller": "the controller",
}
_SERVES = {"evaluation": "evaluator"}  # roles whose work is another one's


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTime:
    """What the processes of one role did within a window, added up."""

    processes: int
    seconds: Mapping[str, float]  # by kind (timeline.KINDS)
    cpu_s: float  # on the run's own cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What happened between two moments of a run."""

    wall_s: float
    roles: Mapping[str, RoleTime]  # by the role in processes' names; the publisher's CPU seconds are the trainer's
    occupied: float  # share of the devices' time in which there was work for them

    def share(self, role: str, *kinds: str) -> float:
        """Of the time of all processes of a role: what went into these kinds; 0 for a role that is not there."""
        if role not in self.roles:
            return 0.0
        time = self.roles[role]
        return sum(time.seconds.get(kind, 0.0) for kind in kinds) / (time.processes * self.wall_s)

    def cpu_share(self, role: str, cores: int) -> float:
        """Of what `cores` cores can do in this time."""
        return self.roles[role].cpu_s / (cores * self.wall_s) if role in self.roles else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What bounded a run."""

    bottleneck: Bottleneck
    busy: float  # share of the time that the bottleneck worked: without bubbles, 1 / busy times as fast
    relieved: float  # times as fast, at most, without the bottleneck; of cores, without their largest user
    text: str  # one paragraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Of a run, between its first version and its last one."""

    text: str  # what bounded it, one paragraph
    idle: dict[str, float]  # share of the time in which processes of a role, generation and trainer, had no work


def explain(
    config: RunConfig, spans: Sequence[Span], curves: split.Curves, *, start_s: float, controller_cpu_s: float
) -> Explanation | None:
    """What bounded a run that got to work at `start_s`, in seconds since the Unix epoch, from its first version to its
    last one: until the first, some had nothing to do yet. None where there are not two versions."""
    published = [span.end_s for span in spans if span.kind == "publish" and span.end_s > start_s]
    if len(published) < 2:
        return None
    first, last = min(published), max(published)
    cpu_s = controller_cpu_s * (last - first) / (last - start_s)
    counted = account(spans, config, start_s=first, end_s=last, controller_cpu_s=cpu_s)
    rates = split.rates(config, curves)
    used, advice = (split.generation_used(config, rates), split.advice(config, rates)) if rates else (None, None)
    text = " ".join(filter(None, (bound(counted, config, used=used).text, advice)))
    idle = {role: 1.0 - counted.share(role, *_WORK) for role in ("generation", "trainer") if role in counted.roles}
    return Explanation(text=text, idle=idle)


def account(
    spans: Sequence[Span], config: RunConfig, *, start_s: float, end_s: float, controller_cpu_s: float = 0.0
) -> Account:
    """What happened between two moments of a run, in seconds since the Unix epoch. A span that reaches over an edge
    counts in part."""
    seconds: dict[str, dict[str, float]] = {}
    cpu_s: dict[str, float] = {}
    processes: dict[str, set[str]] = {}
    for span in spans:
        inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        if inside_s <= 0:
            continue
        role = _SERVES.get(span.role, span.role)
        processes.setdefault(role, set()).add(span.process)
        kinds = seconds.setdefault(role, {})
        kinds[span.kind] = kinds.get(span.kind, 0.0) + inside_s
        part = inside_s / (span.end_s - span.start_s) if _on_the_cores(span, config) else 0.0
        cpu_s[role] = cpu_s.get(role, 0.0) + part * (span.cpu_s or 0.0)
    roles = {
        role: RoleTime(processes=len(names), seconds=seconds[role], cpu_s=cpu_s[role])
        for role, names in processes.items()
    }
    if controller_cpu_s:
        roles["controller"] = RoleTime(processes=1, seconds={}, cpu_s=controller_cpu_s)
    return Account(wall_s=end_s - start_s, roles=roles, occupied=occupied(spans, config, start_s=start_s, end_s=end_s))


def _on_the_cores(span: Span, config: RunConfig) -> bool:
    """Reward workers of other machines have cores that `launch.devices` does not count."""
    return span.role != "rewards" or int(span.process.rpartition("-")[2]) < config.rollout.reward_workers


def occupied(spans: Sequence[Span], config: RunConfig, *, start_s: float, end_s: float) -> float:
    """Share of devices x time in which a generation server or a rank was busy, between two moments.

    At each moment as many devices are busy as there are processes that generate, recompute or train, and no more than
    there are; waiting and being paused for an update are not busy. An emulated trainer stands for all of its ranks.
    """
    devices = {"generation": 1.0, "trainer": config.training_ranks / config.trainer_processes}  # of one process
    edges: list[tuple[float, float]] = [(start_s, 0.0), (end_s, 0.0)]  # when, and how many more are busy from then
    for span in spans:
        more = devices.get(span.role)
        if more and span.kind in _WORK and span.start_s < end_s and span.end_s > start_s:
            edges += [(max(span.start_s, start_s), more), (min(span.end_s, end_s), -more)]
    busy = busy_s = 0.0
    for (at, more), (then, _) in pairwise(sorted(edges)):
        busy += more
        busy_s += min(busy, config.launch.devices) * (then - at)
    return busy_s / (config.launch.devices * (end_s - start_s))


def bound(account: Account, config: RunConfig, *, used: float | None = None) -> Bound:
    """Judge an account of a run of `config`. `used`: of what servers could have generated, the share that they did
    (areal_core.planning.split); None: not known."""
    if config.launch.accelerator == "cpu" and not config.emulated:
        return _of_cores(account, config)
    return _of_stages(account, config, used) if config.max_staleness else _of_turns(account, config)


def _of_cores(account: Account, config: RunConfig) -> Bound:
    """Generation and training on the same cores: how far these had work, and whose."""
    cores = config.launch.devices
    used = {role: account.cpu_share(role, cores) for role in _NAMES}
    total = sum(used.values())
    busy = max(account.occupied, min(1.0, total))  # other roles work where these two do not
    largest = max(used, key=used.__getitem__)
    bottleneck: Bottleneck = "cores" if busy >= _BUSY else "staleness" if config.max_staleness else "turns"
    relieved = 1 / max(busy * (1 - used[largest] / total), 1e-9) if total else 1.0
    by_role = _listed([f"{_NAMES[role]} ({_percent(share)})" for role, share in _largest_first(used) if share > 0])
    known = used["generation"] > 0  # vLLM's servers don't report their CPU seconds
    crowded = known and busy - total > _TAKEN
    sentences = [
        f"{_CAUSES[bottleneck]} limited this run.",
        f"{_cores(cores)} had work {_percent(busy)} of {account.wall_s:.1f} s.",
        f"The run used {_percent(total)} of the CPU time: {by_role}.",
        *(["Other programs used this machine too, so work waited for a core."] if crowded else []),
        _waits(account),
        f"Upper bounds on the speed-up: {_times(1 / busy)} if the cores always had work, {_times(relieved)} if "
        f"{_NAMES[largest]} took no time.",
        _remedy(bottleneck, config),
    ]
    return Bound(bottleneck=bottleneck, busy=busy, relieved=relieved, text=" ".join(sentences))


def _of_stages(account: Account, config: RunConfig, used: float | None) -> Bound:
    """Generation and training on devices of their own, at the same time."""
    shares = {
        "generation": account.share("generation", "generate") if used is None else used,
        "trainer": 1.0 - account.share("trainer", "wait"),
        "rewards": account.share("rewards", "score"),
    }
    (first, busy), (second, next_busy), _ = _largest_first(shares)
    bottleneck: Bottleneck = "staleness"
    if busy >= _BUSY:
        bottleneck = {"generation": "generation", "trainer": "training", "rewards": "rewards"}[first]  # type: ignore[assignment]
    relieved = 1 / max(busy if bottleneck == "staleness" else next_busy, 1e-9)
    room = "" if used is None else f", at {_percent(used)} of their full rate"
    servers = _count(config.generation_servers, "server")
    ranks = _count(config.training_ranks, "rank")
    sentences = [
        f"{_CAUSES[bottleneck]} limited this run of {_duration(account, config)}.",
        f"{ranks} worked {_percent(shares['trainer'])} of the time ("
        f"{_percent(account.share('trainer', 'recompute'))} on proximal log-probabilities).",
        f"{servers} generated {_percent(account.share('generation', 'generate'))} of the time{room}.",
        f"Scoring took {_percent(shares['rewards'])}.",
        _waits(account),
        f"Upper bounds on the speed-up: {_times(1 / busy)} without idle time"
        + ("." if bottleneck == "staleness" else f", {_times(relieved)} with more capacity for {_NAMES[first]}.")
        + ("" if bottleneck == "staleness" else f" Then {_NAMES[second]} would limit the run."),
        _remedy(bottleneck, config),
    ]
    return Bound(bottleneck=bottleneck, busy=busy, relieved=relieved, text=" ".join(sentences))


def _of_turns(account: Account, config: RunConfig) -> Bound:
    """Generation and training in turn, on the same devices."""
    generating, training = account.share("generation", "generate"), account.share("trainer", "recompute", "train")
    busy = min(1.0, generating + training)
    first = "generation" if generating >= training else "trainer"
    relieved = 1 / max(busy - max(generating, training), 1e-9)
    text = (
        f"{_CAUSES['turns']} limited this run of {_duration(account, config)}. Devices generated "
        f"{_percent(generating)} of the time (including the wait for the longest completion of each batch), trained "
        f"{_percent(training)} and were idle {_percent(1 - busy)}. Upper bounds on the speed-up: {_times(1 / busy)} "
        f"without idle time, {_times(relieved)} if {_NAMES[first]} took no time. {_REMEDIES['turns']}"
    )
    return Bound(bottleneck="turns", busy=busy, relieved=relieved, text=text)


_CAUSES: dict[Bottleneck, str] = {
    "cores": "The CPU cores",
    "generation": "Generation",
    "training": "Training",
    "rewards": "Scoring",
    "staleness": "The staleness bound",
    "turns": "Synchronous mode",
}
_REMEDIES: dict[Bottleneck, str] = {
    "cores": "More cores would help (launch.devices).",
    "generation": "More devices for generation would help.",
    "training": "More devices for training would help (training.ranks).",
    "rewards": "More reward workers would help (rollout.reward_workers, or other machines).",
    "staleness": "A larger rollout.max_staleness would help.",
    "turns": "mode=async generates and trains at the same time.",
}


def _remedy(bottleneck: Bottleneck, config: RunConfig) -> str:
    if bottleneck == "staleness" and config.pipeline_depth < config.max_staleness:
        return "A larger rollout.pipeline_depth would help."
    return _REMEDIES[bottleneck]


def _waits(account: Account) -> str:
    """Two sentences on the waits of ranks and servers, as shares of the time."""
    return (
        f"Ranks waited {_percent(account.share('trainer', 'wait'))} of the time for a batch. Servers waited "
        f"{_percent(account.share('generation', 'wait'))} for requests and "
        f"{_percent(account.share('generation', 'update'))} for new model weights."
    )


def _duration(account: Account, config: RunConfig) -> str:
    if config.emulated:
        return f"{account.wall_s * config.emulation.speed:.0f} emulated seconds"
    return f"{account.wall_s:.1f} s"


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _cores(count: int) -> str:
    return "One core" if count == 1 else f"{count} cores"


def _largest_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _times(factor: float) -> str:
    return f"{factor:.2f}x"
