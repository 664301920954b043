"""Records that stages exchange. Frozen and typed; shapes and units are noted at the field.

Axes: G rollouts of a group, S token sequences of all of them, Q distinct prompts of these, L tokens of one sequence, T
tokens of all sequences of a group after their prompts, laid end to end.
This module imports neither torch nor anything that talks to the outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

FORMAT = 13  # of what a run stores and of what its processes send each other: another one is refused


class GroupState(StrEnum):
    """The state of a trajectory group: WAITING -> INFLIGHT -> READY -> CONSUMED, or DROPPED."""

    WAITING = "waiting"  # its prompt is queued, it is not admitted
    INFLIGHT = "inflight"  # admitted: it generates or is being scored
    READY = "ready"  # scored, in the buffer
    CONSUMED = "consumed"  # part of a fixed batch
    DROPPED = "dropped"  # given up, with a reason; its slot is free again


class Outcome(StrEnum):
    """What a rollout has come to. The last two are no result: they say nothing about the policy."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"  # it gives none
    UNPARSABLE = "unparsable"  # the answer that it gives can't be read
    # The answer takes the verifier to its limits or ends its process, in a fresh one too; or the environment itself has
    # held the rollout up beyond its deadline.
    TIMED_OUT = "timed_out"
    OVER_LIMIT = "over_limit"  # the rollout has no room for another turn, or no turn left
    CUT = "cut"  # the system has ended the rollout while it waited for the policy: no result
    FAILED = "failed"  # the verifier itself did


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The form of an adapter (Hu et al., 2021, arXiv 2106.09685): of each linear layer that `targets` names, with its
    weight W, alpha / rank * B A is added to W."""

    rank: int  # rows of A and columns of B
    alpha: float
    targets: tuple[str, ...]  # last parts of the layers' names: "q_proj"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt. `index` is its place in the source's order; held-out prompts count from 0 as well."""

    index: int
    prompt_id: str  # hash of the text, hexadecimal
    text: str
    token_ids: tuple[int, ...]
    answer: str  # the gold answer as the verifier wants it
    # All that its source knows of it, in JSON's values: the row of a file, the entry of a data set.
    row: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    task: str = ""  # its name in the mixture, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request for the G completions of a group."""

    request_id: str
    token_ids: tuple[int, ...] | Int32Array  # [L]; an array where it continues a completion
    n: int  # G
    max_tokens: int
    seed: int  # completion j samples from the stream (seed, j); see generation.engines.scheduler
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    temperature: float = 1.0  # of the distribution that tokens are sampled from, unless greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the policy generates for a prompt: sampled tokens."""

    token_ids: Int32Array  # [L] the end token included
    logprobs: Float32Array  # [L] log-probability of the sampled distribution, nats
    versions: Int32Array  # [L] policy version that sampled the token
    finish_reason: str  # stop, length or abort


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Calls of rollouts with equal `token_ids`, one completion for each."""

    token_ids: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]  # (rollout of the group, its call, counted from 0)
    max_tokens: int  # of each completion
    stop: tuple[int, ...] = ()  # tokens that end a completion, beside those that end every one


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a trajectory that came from one side: the prompt, a message of the environment, or a completion."""

    token_ids: Int32Array  # [L]
    loss_mask: BoolArray  # [L] tokens that the policy is trained on; only tokens that it sampled
    logprobs: Float32Array  # [L] under the behaviour policy, nats; 0 where it did not sample
    versions: Int32Array  # [L] policy version that sampled the token; -1 where none did
    call: int = -1  # the rollout's call that sampled it, counted from 0; -1: it is the environment's
    reward: float = 0.0  # of this turn, for algorithm.credit=turn; the rollout's own counts at its last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One token sequence of a rollout: segments in their order. The first is its prompt."""

    segments: tuple[Segment, ...]
    reward: float | None = None  # its own, for algorithm.credit=sequence; None: the rollout's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task: its sequences, and a reward for all of them."""

    reward: float | None  # None: its verifier found no result, and it is left out
    outcome: Outcome  # for the curves; training sees the reward alone
    trajectories: tuple[Trajectory, ...] | None = None  # None: as its policy has recorded them
    truncated: bool | None = None  # it ran into the length limit; None: as its policy has seen
    answer: str | None = None  # what its verifier has read, for people and for votes
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # by curve name: means over the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout for people and for scores."""

    text: str  # after its prompt; later sequences include their prompts
    tokens: int  # sampled ones
    truncated: bool  # it ran into the length limit
    outcome: Outcome
    score: float | None  # its reward; None: there is no result
    answer: str | None  # what the verifier has read
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # its environment's numbers, by name

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """What the trainer learns from: sequences of one group, without their prompts, laid end to end."""

    prompts: tuple[Int32Array, ...]  # [Q] what sequences begin with, each once
    prompt_of: Int32Array  # [S] of each sequence
    lengths: Int32Array  # [S] tokens of each sequence after its prompt; T is their sum
    tokens: Int32Array  # [T] completions, end tokens included, and the environment's messages between them
    loss_mask: BoolArray  # [T] tokens that the policy is trained on; none where there is no reward
    logprobs: Float32Array  # [T] log-probability under the behaviour policy, nats; 0 where it did not sample
    versions: Int32Array  # [T] policy version that sampled the token; -1 where none did
    truncated: BoolArray  # [S] the rollout that it belongs to ran into the length limit
    loss_tokens: Int32Array  # [S] tokens that this rollout is trained on, in all of its sequences


class Return(NamedTuple):
    """The return of one part of a sequence: its reward, and those of later turns with their discount."""

    sequence: int
    end: int  # tokens of the sequence after its prompt, up to the part's end; it begins where the one before ends
    value: float | None  # None: no result


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """What it takes to read a group's payload, and its rewards."""

    prompts: tuple[int, ...]  # [Q] tokens of each distinct prompt
    prompt_of: tuple[int, ...]  # [S] prompt of each sequence
    rollout_of: tuple[int, ...]  # [S] rollout of each sequence, ascending
    lengths: tuple[int, ...]  # [S] tokens of each sequence after its prompt
    loss_tokens: tuple[int, ...]  # [G] tokens that each rollout is trained on
    rewards: tuple[float | None, ...]  # [G]; None: its verifier found no result
    truncated: tuple[bool, ...]  # [G] it ran into the length limit
    tokens: int  # sampled ones of all sequences
    returns: tuple[Return, ...] = ()  # by sequence and end; empty: algorithm.credit=rollout
    checksums: tuple[int, ...] = ()  # [Q + S] CRC-32 of the parts of its payload (api.scored_groups)

    @property
    def trained_lengths(self) -> list[int]:
        """Tokens that each rollout with a reward is trained on."""
        return [n for n, reward in zip(self.loss_tokens, self.rewards, strict=True) if reward is not None]

    @property
    def compared(self) -> set[float]:
        """The distinct values that advantages compare. A single one teaches nothing."""
        values = [part.value for part in self.returns] if self.returns else self.rewards
        return {value for value in values if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary(PackedGroup):
    """What the ledger and the metrics need of a group without opening its payload."""

    min_version: int  # oldest token
    max_version: int
    outcomes: dict[Outcome, int]  # rollouts of each, of G
    unused_tokens: int = 0  # sampled ones that the environment took into no sequence
    # The environment's numbers by curve name, of the rollouts that have them.
    metrics: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    task: str = ""  # its name in the mixture, if there is one

    @property
    def correct(self) -> int:
        """Rollouts that were correct, of G."""
        return self.outcomes.get(Outcome.CORRECT, 0)

    @property
    def judged(self) -> int:
        """Rollouts that have a reward, of G."""
        return sum(reward is not None for reward in self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup(PackedGroup):
    """One group's row of a fixed batch: what every rank has to know of it, and where its payload lies."""

    group_id: int
    ready_version: int  # policy version in force when the group entered the buffer
    segment: str  # name of the file that its payload is a part of
    start: int  # bytes from the file's beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """The fixed content of one training step: the same for every rank, at every call, after every restart."""

    step: int  # the step trains on version step - 1 and makes version `step`
    groups: tuple[BatchGroup, ...]  # P = B / G, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A published set of weights."""

    version: int  # 0 is the base model
    path: str  # folder that holds its file, model.safetensors or an adapter's, and manifest.json
    digest: str  # the blake3 hash of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Tokens that servers have sampled for a request."""

    tokens: int = 0
    unread: int = 0  # more, at most, in bodies that can't be read

    def __add__(self, other: Tally) -> Tally:
        return Tally(tokens=self.tokens + other.tokens, unread=self.unread + other.unread)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLedger:
    """Two counts of the sampled tokens: the generation servers' own, and that by the state of their groups."""

    generated: int  # by the servers' own counters, for rollouts
    consumed: int  # of groups that are part of a batch
    dropped: int  # of groups and tries that were given up
    buffered: int  # of READY groups
    in_flight: int  # of groups that were running at the end of the run
    allowance: int = 0  # that the two may differ by: sampled by servers that died, and returned to nobody

    @property
    def accounted(self) -> int:
        return self.consumed + self.dropped + self.buffered + self.in_flight

    @property
    def balanced(self) -> bool:
        return abs(self.generated - self.accounted) <= self.allowance

    def __str__(self) -> str:
        return (
            f"{self.generated:,} generated; ledger: {self.accounted:,} = {self.consumed:,} consumed"
            f" + {self.dropped:,} dropped + {self.buffered:,} buffered + {self.in_flight:,} in flight"
            + (f"; allowance {self.allowance:,}" if self.allowance else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The score of one policy version on the held-out prompts."""

    version: int
    digest: str  # of its weights: after a new incarnation of the run the number alone does not say which
    accuracy: float  # share of the prompts whose greedy completion is correct
    prompts: int
    no_result: int  # prompts whose greedy completion the verifier could not judge
    mean_tokens: float  # mean length of a completion
    wall_s: float
    scores: dict[str, float] = field(default_factory=dict[str, float])  # others, by name, intervals among them


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One point of one curve; keyed by (key, step) within a run."""

    key: str
    step: int
    value: float
    time_s: float  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that is wrong with a run which goes on; see areal_core.controller.health."""

    kind: str
    step: int  # that it began with
    text: str


STOPPED = "stopped"  # the reason to end a run with a checkpoint and no result, so that it can be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A look at a running experiment, as the controller returns it at GET /status."""

    step: int  # last step whose version is published
    steps: int
    version: int  # lowest version loaded by a server that takes work
    reward: float | None  # mean reward of the last batch
    accuracy: float | None  # last held-out accuracy
    staleness: float | None  # mean tokens' staleness of the last batch, versions
    effective_tokens_per_s: float | None  # consumed, over the last step
    generated_tokens_per_s: float | None
    elapsed_s: float  # RL wall time so far
    eta_s: float | None  # time left, estimated
    finished: str | None  # reason, once the run is ending
    emulated: bool = False  # tokens a second are those of an emulated cluster
    truncated: float | None = None  # share of the last batch's completions that ran into the length limit
    zero_variance: float | None = None  # share of its groups whose rewards are all equal
    lost_servers: tuple[str, ...] = ()  # URLs of generation servers that were taken out: to be started again
    alerts: tuple[Alert, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended; the controller writes it once, and its absence means that the run failed."""

    run_id: str
    name: str
    mode: str
    seed: int
    reason: str  # steps, score, minutes, or what somebody has said who has had it ended
    steps: int
    accuracy_before: float | None  # None, as the two below: versions were not scored
    accuracy_after: float | None
    best_accuracy: float | None
    rl_wall_s: float  # first admission to last published version
    time_to_score_s: float | None  # RL wall time until stop.score was reached, if one was set and reached
    tokens: TokenLedger
    effective_tokens_per_s: float
    generated_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    model_url: str  # the final model, transformers format
    incarnation: int  # times that recovery could not reproduce a version's weights
    emulated: str | None = None  # the cluster whose tokens a second these are; None: this machine
    staleness_tokens: dict[str, int] = field(default_factory=dict[str, int])  # tokens trained on, by their staleness
    starts: int = 1  # times that its controller was started and got to work; above 1, work was done twice
    truncated: float | None = None  # share of the completions trained on that ran into the length limit
    zero_variance: float | None = None  # share of the groups trained on whose rewards are all equal
    alerts: tuple[str, ...] = ()  # that stood at the end
    bound: str | None = None  # what bounded the run, and what would have made it faster, for people
    idle: dict[str, float] = field(default_factory=dict[str, float])  # share of servers' and ranks' time, by role
