"""A share of a run: what one remote worker runs, and which processes and files are its own."""

from __future__ import annotations

from dataclasses import dataclass

from areal_core.config.engines import known_generation
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError

GENERATION, TRAINER, REWARDS = "generation", "trainer", "rewards"
_MOST_WORKERS = 4096
FIRST_RANK = "trainer-0"
LOGS, TIMELINE = "logs", "timeline"  # folders of a run to which processes of a share append


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Generation servers, the ranks of one of the machines that train, or reward workers."""

    role: str  # GENERATION, TRAINER or REWARDS
    first: int = 0  # number of the first server, of the machine, or of the first reward worker of other machines
    count: int | None = None  # servers or workers; None: all of the run's servers; of machines, and workers, one

    @property
    def indices(self) -> range:
        """Of servers, of workers, or of the one machine, in a share that is settled."""
        assert self.count is not None
        return range(self.first, self.first + self.count)

    @property
    def journal(self) -> str:
        """The role under which its remote worker logs."""
        return f"host-{self.role}"

    def overlaps(self, other: Share) -> bool:
        return self.role == other.role and bool(set(self.indices).intersection(other.indices))

    def settled(self, config: RunConfig) -> Share:
        """With its count. Raises ConfigError for what is no share of the run."""
        if self.role == REWARDS:  # beside those of the controller's machine, whatever the run has
            if self.first + (count := self.count or 1) > _MOST_WORKERS:
                raise ConfigError(f"--workers: all machines may have {_MOST_WORKERS}, got {self.first + count}")
            return Share(role=self.role, first=self.first, count=count)
        if self.role not in config.remote_roles:
            raise ConfigError(
                f"launch.remote_roles: must be {self.role} or both for another machine to take that role over, "
                f"got {config.launch.remote_roles!r}"
            )
        if self.role == TRAINER:
            least = int(config.launch.head_trains)
            if not least <= self.first < config.training.hosts:
                why = ", as training.hosts counts the head node, which is 0" if least else ""
                raise ConfigError(f"--node: must be from {least} to {config.training.hosts - 1}{why}, got {self.first}")
            return Share(role=self.role, first=self.first, count=1)
        count = self.count or config.generation_servers
        if self.first + count > config.generation_servers:
            raise ConfigError(
                f"--first: servers {self.first} to {self.first + count - 1} are more than the run has, "
                f"{config.generation_servers} (generation.servers); --servers says how many are here"
            )
        return Share(role=self.role, first=self.first, count=count)


@dataclass(frozen=True, slots=True)
class Owned:
    """What a share's machine has to itself."""

    processes: frozenset[str]  # that announce themselves and have a heartbeat: generation-0, trainer-1
    files: frozenset[tuple[str, str]]  # that they and their remote worker append to: folder and name


def places(config: RunConfig, share: Share) -> range:
    """Of the reward workers of a share among all of the run's: they come after those of the controller's machine."""
    first = config.rollout.reward_workers + share.first
    return range(first, first + len(share.indices))


def owned(config: RunConfig, share: Share) -> Owned:
    """What belongs to a share that is settled."""
    if share.role == GENERATION:
        processes = [f"generation-{index}" for index in share.indices]
        vllm = known_generation(config.generation.engine).own_server  # whose timelines the controller writes
        logs = [*processes, *(f"vllm-{index}" for index in share.indices if vllm)]
        timelines = [] if vllm else processes
    elif share.role == REWARDS:
        timelines = [f"rewards-{place}" for place in places(config, share)]
        processes = logs = timelines[:1]
    else:
        ranks = range(share.first * config.ranks_per_host, (share.first + 1) * config.ranks_per_host)
        processes = [f"trainer-{rank}" for rank in ranks]
        logs, timelines = [f"node-{share.first}"], processes
        if FIRST_RANK in processes:
            timelines = [*processes, "publisher-0"]
    logs = [*logs, f"{share.journal}-{share.first}"]
    return Owned(
        processes=frozenset(processes),
        files=frozenset([(LOGS, f"{name}.log") for name in logs] + [(TIMELINE, f"{name}.jsonl") for name in timelines]),
    )
