"""Immutable records exchanged between stages; each field notes its shape and unit.

Axes: G rollouts of a group, S token sequences of all rollouts, Q distinct prompts of the sequences. L tokens of one
sequence, T concatenated tokens of all sequences of a group, without their prompts. This module imports neither torch
nor any module that does I/O.
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

FORMAT = 13  # version of stored data and of messages between processes; other versions are rejected


class GroupState(StrEnum):
    """The state of a trajectory group: WAITING -> INFLIGHT -> READY -> CONSUMED, or DROPPED."""

    WAITING = "waiting"  # its prompt is queued, but not admitted
    INFLIGHT = "inflight"  # admitted: being generated or scored
    READY = "ready"  # scored, in the buffer
    CONSUMED = "consumed"  # part of a fixed batch
    DROPPED = "dropped"  # abandoned, with a reason; its slot is free again


class Outcome(StrEnum):
    """The outcome of a rollout. The last two are no result: they say nothing about the policy."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"  # the completion gives no answer
    UNPARSABLE = "unparsable"  # the answer can't be parsed
    # The answer exceeds the verifier's limits or crashes its process, also in a fresh one. Or the environment
    # itself delayed the rollout beyond its deadline.
    TIMED_OUT = "timed_out"
    OVER_LIMIT = "over_limit"  # the rollout has no context or no turn left
    CUT = "cut"  # the system ended the rollout during a wait for the policy: no result
    FAILED = "failed"  # the verifier itself failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The form of a LoRA adapter (Hu et al., 2021, arXiv 2106.09685).
    Each linear layer in `targets` with weight W uses W + alpha / rank * B A."""

    rank: int  # rows of A and columns of B
    alpha: float
    targets: tuple[str, ...]  # last parts of layer names: "q_proj"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt. `index` is its position in the source; held-out prompts also count from 0."""

    index: int
    prompt_id: str  # hash of the text, hexadecimal
    text: str
    token_ids: tuple[int, ...]
    answer: str  # the gold answer in the verifier's format
    # The whole row of a file, or entry of a data set, as JSON values.
    row: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    task: str = ""  # name of its task in a mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request for the G completions of a group."""

    request_id: str
    token_ids: tuple[int, ...] | Int32Array  # [L]; an array if the request continues a completion
    n: int  # G
    max_tokens: int
    seed: int  # completion j samples from random stream (seed, j); see generation.engines.scheduler
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    temperature: float = 1.0  # sampling temperature, unless greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the policy sampled for a prompt."""

    token_ids: Int32Array  # [L] including the end token
    logprobs: Float32Array  # [L] log-probability of the sampled distribution, nats
    versions: Int32Array  # [L] policy version that sampled the token
    finish_reason: str  # stop, length or abort


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Calls of rollouts with equal `token_ids`; one completion per call."""

    token_ids: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]  # (rollout in the group, index of its call)
    max_tokens: int  # per completion
    stop: tuple[int, ...] = ()  # more stop tokens, in addition to the usual ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a trajectory from one side: the prompt, an environment message, or a completion."""

    token_ids: Int32Array  # [L]
    loss_mask: BoolArray  # [L] tokens to train on; only tokens that the policy sampled
    logprobs: Float32Array  # [L] under the behaviour policy, nats; 0 for unsampled tokens
    versions: Int32Array  # [L] policy version that sampled the token; -1 where none did
    call: int = -1  # index of the rollout's call that sampled it; -1: not sampled
    reward: float = 0.0  # of this turn, for algorithm.credit=turn; the rollout's reward is added at its last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One token sequence of a rollout: its segments in order, starting with the prompt."""

    segments: tuple[Segment, ...]
    reward: float | None = None  # of this sequence, for algorithm.credit=sequence; None: the rollout's


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task: its token sequences, and a reward for all of them."""

    reward: float | None  # None: no result; the rollout leaves the loss
    outcome: Outcome  # only for curves; training uses the reward
    trajectories: tuple[Trajectory, ...] | None = None  # None: as recorded by its policy
    truncated: bool | None = None  # reached the length limit; None: as recorded by its policy
    answer: str | None = None  # answer read by its verifier, for people and for majority votes
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # by curve name; averaged over the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout, for display and for scores."""

    text: str  # without the prompt; later sequences include their prompts
    tokens: int  # number of sampled tokens
    truncated: bool  # it ran into the length limit
    outcome: Outcome
    score: float | None  # its reward; None: no result
    answer: str | None  # answer read by the verifier
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # environment metrics, by name

    @property
    def correct(self) -> bool:
        return self.outcome is Outcome.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """The training data of one group: its concatenated sequences, without their prompts."""

    prompts: tuple[Int32Array, ...]  # [Q] distinct prompts of the sequences
    prompt_of: Int32Array  # [S] prompt index of each sequence
    lengths: Int32Array  # [S] tokens of each sequence after its prompt; T is their sum
    tokens: Int32Array  # [T] completions with end tokens, and the environment's messages between them
    loss_mask: BoolArray  # [T] tokens to train on; none without a reward
    logprobs: Float32Array  # [T] log-probability under the behaviour policy, nats; 0 for unsampled tokens
    versions: Int32Array  # [T] policy version that sampled the token; -1 where none did
    truncated: BoolArray  # [S] whether the sequence's rollout reached the length limit
    loss_tokens: Int32Array  # [S] training tokens of the sequence's rollout, over all its sequences


class Return(NamedTuple):
    """The return of one part of a sequence: its reward, plus discounted rewards of later turns."""

    sequence: int
    end: int  # end of the part, in tokens after the prompt; it starts at the previous end
    value: float | None  # None: no result


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGroup:
    """Layout of a group's payload, and the group's rewards."""

    prompts: tuple[int, ...]  # [Q] tokens of each distinct prompt
    prompt_of: tuple[int, ...]  # [S] prompt of each sequence
    rollout_of: tuple[int, ...]  # [S] rollout of each sequence, ascending
    lengths: tuple[int, ...]  # [S] tokens of each sequence after its prompt
    loss_tokens: tuple[int, ...]  # [G] training tokens of each rollout
    rewards: tuple[float | None, ...]  # [G]; None: no result
    truncated: tuple[bool, ...]  # [G] whether the rollout reached the length limit
    tokens: int  # sampled tokens of all sequences
    returns: tuple[Return, ...] = ()  # by sequence and end; empty: algorithm.credit=rollout
    checksums: tuple[int, ...] = ()  # [Q + S] CRC-32 of the parts of its payload (api.scored_groups)

    @property
    def trained_lengths(self) -> list[int]:
        """Training tokens of each rollout with a reward."""
        return [n for n, reward in zip(self.loss_tokens, self.rewards, strict=True) if reward is not None]

    @property
    def compared(self) -> set[float]:
        """The distinct values that advantages compare; a zero-variance group has only one."""
        values = [part.value for part in self.returns] if self.returns else self.rewards
        return {value for value in values if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary(PackedGroup):
    """Data on a group for the ledger and the metrics, without its payload."""

    min_version: int  # policy version of the oldest token
    max_version: int
    outcomes: dict[Outcome, int]  # outcome -> number of rollouts, of G
    unused_tokens: int = 0  # sampled tokens that the environment put into no sequence
    # Environment metrics by curve name, of the rollouts that have them.
    metrics: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    task: str = ""  # name of its task in a mixture

    @property
    def correct(self) -> int:
        """Number of correct rollouts, of G."""
        return self.outcomes.get(Outcome.CORRECT, 0)

    @property
    def judged(self) -> int:
        """Number of rollouts with a reward, of G."""
        return sum(reward is not None for reward in self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup(PackedGroup):
    """One group of a fixed batch, and the location of its payload; equal for all ranks."""

    group_id: int
    ready_version: int  # policy version in force when the group entered the buffer
    segment: str  # name of the file with its payload
    start: int  # offset in the file, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """The fixed content of one training step: equal for every rank, every call and after every restart."""

    step: int  # the step trains version step - 1 and makes version `step`
    groups: tuple[BatchGroup, ...]  # P = B / G, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A published set of model weights."""

    version: int  # 0 is the base model
    path: str  # folder with model.safetensors or an adapter, and manifest.json
    digest: str  # blake3 hash of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Tokens that servers have sampled for a request."""

    tokens: int = 0
    unread: int = 0  # upper bound on further tokens, in unreadable response bodies

    def __add__(self, other: Tally) -> Tally:
        return Tally(tokens=self.tokens + other.tokens, unread=self.unread + other.unread)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLedger:
    """Two counts of the sampled tokens: by the servers' counters, and by the state of their groups."""

    generated: int  # by the servers' counters, for rollouts
    consumed: int  # of groups in a batch
    dropped: int  # of abandoned groups and tries
    buffered: int  # of READY groups
    in_flight: int  # of groups that were running at the end of the run
    allowance: int = 0  # allowed difference: tokens of servers that died, never returned

    @property
    def accounted(self) -> int:
        return self.consumed + self.dropped + self.buffered + self.in_flight

    @property
    def balanced(self) -> bool:
        return abs(self.generated - self.accounted) <= self.allowance

    def __str__(self) -> str:
        differs = "" if self.generated == self.accounted else f" by the servers; by the ledger {self.accounted:,}"
        return (
            f"{self.generated:,} generated{differs} = {self.consumed:,} consumed"
            f" + {self.dropped:,} dropped + {self.buffered:,} buffered + {self.in_flight:,} in flight"
            + (f"; allowance {self.allowance:,}" if self.allowance else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The score of one policy version on the held-out prompts."""

    version: int
    digest: str  # hash of its model weights: after a new incarnation, the number alone is ambiguous
    accuracy: float  # share of prompts with a correct greedy completion
    prompts: int
    no_result: int  # prompts whose greedy completion the verifier could not judge
    mean_tokens: float  # mean length of a completion
    wall_s: float
    scores: dict[str, float] = field(default_factory=dict[str, float])  # further scores by name, including intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One point of one curve; keyed by (key, step) within a run."""

    key: str
    step: int
    value: float
    time_s: float  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A problem of a running run; see areal_core.controller.health."""

    kind: str
    step: int  # first step with the problem
    text: str


STOPPED = "stopped"  # reason of a stop with a checkpoint and without a summary; the run can be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a running run, as the controller returns it at GET /status."""

    step: int  # last step with a published version
    steps: int
    version: int  # lowest version on a serving server
    reward: float | None  # mean reward of the last batch
    accuracy: float | None  # last held-out accuracy
    staleness: float | None  # mean token staleness of the last batch, in versions
    effective_tokens_per_s: float | None  # consumed tokens per second, over the last step
    generated_tokens_per_s: float | None
    elapsed_s: float  # RL wall time so far
    eta_s: float | None  # estimated remaining time
    finished: str | None  # reason, once the run is ending
    emulated: bool = False  # tokens per second are those of an emulated cluster
    truncated: float | None = None  # share of truncated completions in the last batch
    zero_variance: float | None = None  # share of zero-variance groups in the last batch
    lost_servers: tuple[str, ...] = ()  # URLs of generation servers that were taken out, to be restarted
    alerts: tuple[Alert, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The result of a run. The controller writes it once; a failed run has none."""

    run_id: str
    name: str
    mode: str
    seed: int
    reason: str  # steps, score, minutes, or the reason given for ending it
    steps: int
    accuracy_before: float | None  # None, like the next two: versions were not scored
    accuracy_after: float | None
    best_accuracy: float | None
    rl_wall_s: float  # first admission to last published version
    time_to_score_s: float | None  # RL wall time until stop.score; None if unset or not reached
    tokens: TokenLedger
    effective_tokens_per_s: float
    generated_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    model_url: str  # the final model, transformers format
    incarnation: int  # times that recovery could not reproduce a version
    emulated: str | None = None  # emulated cluster of the token rates; None: this machine
    staleness_tokens: dict[str, int] = field(default_factory=dict[str, int])  # staleness -> trained tokens
    starts: int = 1  # starts of the controller; above 1, some work was repeated
    truncated: float | None = None  # share of truncated completions among those trained on
    zero_variance: float | None = None  # share of zero-variance groups among those trained on
    alerts: tuple[str, ...] = ()  # active at the end
    bound: str | None = None  # bottleneck report
    idle: dict[str, float] = field(default_factory=dict[str, float])  # role -> share of its time without work
