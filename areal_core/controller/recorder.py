"""Record a run: its metrics, its status and its final summary.

The run's notes, beside the ledger's groups, hold everything that must survive a restart of the controller. Metric rows
go to the outbox and from there to MLflow. `docs/metrics.md` defines every key. The recorder decides only when to stop.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from areal_core.api.wire import ServerLoad
from areal_core.config.plugins import find
from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger, length_step
from areal_core.controller.core.tables import Ending
from areal_core.controller.health import Health
from areal_core.errors import RewardError, RewardTimeoutError, RewardWorkerError, TrackingError
from areal_core.planning.bottleneck import explain
from areal_core.tracking.outbox import Outbox, points
from areal_core.tracking.timeline import Span
from areal_core.types import BatchManifest, Evaluation, GroupSummary, MetricRow, Outcome, RunStatus, RunSummary

logger = logging.getLogger(__name__)

BatchMetrics = Callable[[Sequence[GroupSummary]], dict[str, float]]  # a function of the groups of a step's batch


def _means(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Metrics of a batch that each task of a mixture also has by itself."""
    judged = sum(group.judged for group in groups)
    return {
        "reward/mean": sum(reward for group in groups for reward in group.rewards if reward is not None) / judged,
        "reward/correct": sum(group.correct for group in groups) / judged,
        "completion/tokens_mean": sum(group.tokens for group in groups) / sum(len(group.rewards) for group in groups),
    }


def _length_shares(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Share of a batch's rollouts by trained length, in the same length bins as the ledger's cut rollouts."""
    counts = Counter(length_step(length) for group in groups for length in group.trained_lengths)
    return {f"length/{step}": count / counts.total() for step, count in counts.items()}


class Recorder:
    """The record of one run. Belongs to the controller's event loop. `clock` returns monotonic seconds."""

    def __init__(
        self,
        config: RunConfig,
        ledger: TrajectoryLedger,
        outbox: Outbox,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._outbox = outbox
        self._clock = clock
        self._started: float | None = None
        self._started_at, self._cpu_s = 0.0, 0.0  # Unix time and this process's CPU seconds when the clock started
        self._notes = ledger.notes
        self._elapsed_before = self._notes.elapsed_s
        self.evaluations = self._notes.evaluations()
        self._last_load: tuple[float, list[ServerLoad]] | None = None
        self._batch_metrics: BatchMetrics | None = None
        if config.tracking.batch_metrics is not None:
            self._batch_metrics = find("tracking.batch_metrics", config.tracking.batch_metrics, {})
        self._live: dict[str, float] = {}  # newest values of the keys that the status shows
        self._health = Health(
            config.health, groups=config.groups_per_batch, steps=config.training.steps, learns=not config.emulated
        )

    # -- time --------------------------------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Start RL wall time, when the first server takes requests.
        Later calls have no effect. Logs the scores that came before the first start."""
        if self._started is None:
            self._started = self._clock()
            self._started_at, self._cpu_s = time.time(), time.process_time()
            if not self._notes.starts:
                for known in self.evaluations:
                    self._log_scores(known)
            self._notes.count_start()

    @property
    def elapsed_s(self) -> float:
        """RL wall time in seconds, over all restarts."""
        return self._elapsed_before + (0.0 if self._started is None else self._clock() - self._started)

    # -- events ------------------------------------------------------------------------------------------------

    def record_batch(self, manifest: BatchManifest) -> None:
        """Record the metrics of a batch when it is fixed."""
        step = manifest.step
        groups = self._ledger.summaries(step)
        rollouts = sum(len(group.rewards) for group in groups)
        lag = [step - 1 - group.min_version for group in groups]
        self.log(
            step,
            {
                **_means(groups),
                **{
                    f"{key}/{task}": value
                    for task in {group.task for group in groups} - {""}
                    for key, value in _means([group for group in groups if group.task == task]).items()
                },
                "reward/zero_variance": self._zero_variance(groups),
                **{
                    f"outcome/{outcome}": sum(group.outcomes.get(outcome, 0) for group in groups) / rollouts
                    for outcome in Outcome
                },
                **_length_shares(groups),
                "completion/tokens_longest": sum(max(group.lengths) for group in groups) / len(groups),
                "completion/truncated": sum(sum(group.truncated) for group in groups) / rollouts,
                "staleness/oldest_token_mean": sum(lag) / len(lag),
                "staleness/oldest_token_max": max(lag),
                "staleness/groups_over_bound": sum(value > self._config.max_staleness for value in lag),
            },
        )
        own: defaultdict[str, list[float]] = defaultdict(list)
        for group in groups:
            for name, numbers in group.metrics.items():
                own[name] += numbers
        self.log(step, {name: sum(numbers) / len(numbers) for name, numbers in own.items()})
        if self._batch_metrics is not None:
            with self._tracking():
                self.log(step, self._own_metrics(self._batch_metrics, groups))

    def _own_metrics(self, function: BatchMetrics, groups: Sequence[GroupSummary]) -> dict[str, float]:
        """Call the user's batch metrics function. Raises TrackingError if it fails."""
        try:
            return dict(function(groups))
        except Exception as error:
            name = self._config.tracking.batch_metrics
            wanted = "return a mapping of names to numbers, without an error"
            raise TrackingError(f"tracking.batch_metrics: {name} must {wanted}, got {error!r}") from error

    def _zero_variance(self, groups: Sequence[GroupSummary]) -> float:
        """Share of a batch's groups whose rewards are all equal.
        With advantages over the whole batch: 1 if all rewards of the batch are equal, else 0."""
        rewards = [group.compared for group in groups]
        if self._config.algorithm.advantage.startswith("batch"):
            rewards = [set[float]().union(*rewards)]
        return sum(len(each) == 1 for each in rewards) / len(rewards)

    def records_tables(self, step: int) -> bool:
        """Whether texts and histograms of a step are recorded."""
        return step == 1 or step % self._config.tracking.table_every == 0

    def record_step(self, step: int, loads: Sequence[ServerLoad]) -> None:
        """Record a finished step: throughput and bubbles since the previous step, and the token ledger."""
        now = self.elapsed_s
        step_s = max(now - (self._notes.published_s(step - 1) or 0.0), 1e-9)
        tokens = self._ledger.tokens()
        dropped = self._ledger.dropped()
        batch_tokens = sum(group.tokens for group in self._ledger.summaries(step))
        values = {
            "time/elapsed_s": now,
            "time/step_s": step_s,
            "throughput/effective_tokens_per_s": self._rate(batch_tokens, step_s),
            "throughput/effective_tokens_per_s_per_device": self._rate(batch_tokens, step_s)
            / self._config.launch.devices,
            "ledger/generated_tokens": tokens.generated,
            "ledger/consumed_tokens": tokens.consumed,
            "ledger/dropped_tokens": tokens.dropped,
            "ledger/buffered_tokens": tokens.buffered,
            "ledger/in_flight_tokens": max(
                0, tokens.generated - tokens.accounted
            ),  # groups in flight end only with the run
            "rollout/servers": len(loads),
            "rollout/dropped_groups": sum(dropped.values()),
            "rollout/zero_variance_groups": dropped.get("zero_variance", 0),
            **{f"cut/{name}": count for name, count in self._ledger.cut().items()},
            **{
                f"rollout/{kind.drop_reason}_groups": dropped.get(kind.drop_reason, 0)
                for kind in (RewardError, RewardTimeoutError, RewardWorkerError)
            },
        }
        self.log(step, values | self._server_rates(now, list(loads)))
        self._notes.publish(step, now)  # last, so that a step in the notes is recorded completely

    def has_recorded_step(self, step: int) -> bool:
        """Whether `record_step` was completed for a step.
        If the controller died before, `record_step` is called again."""
        return self._is_pruned(step) or self._notes.published_s(step) is not None

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Record a version's held-out score, unless it already has one."""
        if any(known.version == evaluation.version for known in self.evaluations):
            return
        if self._notes.starts:
            self._log_scores(evaluation)
        self._notes.add_evaluation(evaluation)
        self.evaluations.append(evaluation)

    def _log_scores(self, evaluation: Evaluation) -> None:
        """Log scores at the version's time of publication, not of evaluation.
        Version 0 counts as published at the first start of the clock, and its score is logged then."""
        published_s = 0.0 if evaluation.version == 0 else self._notes.published_s(evaluation.version)
        ago_s = 0.0 if published_s is None else self.elapsed_s - published_s
        self.log(
            evaluation.version,
            {
                "heldout/accuracy": evaluation.accuracy,
                "heldout/no_result": evaluation.no_result / evaluation.prompts,
                "heldout/completion_tokens_mean": evaluation.mean_tokens,
                "heldout/wall_s": evaluation.wall_s,
                **{f"heldout/{name}": value for name, value in evaluation.scores.items()},
            },
            ago_s=ago_s,
        )

    def forget(self, version: int) -> None:
        """Delete the scores and notes of `version` and later ones, which recovery has replaced."""
        self.evaluations = [known for known in self.evaluations if known.version < version]
        self._notes.forget(version)

    def log(self, step: int, values: dict[str, float], *, ago_s: float = 0.0) -> None:
        """Log metrics of one step, time-stamped `ago_s` seconds before now."""
        self.log_rows(points(step, values, ago_s=ago_s))

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        values = {row.key: row.value for row in rows}
        self._live.update(values)
        self._health.check(max((row.step for row in rows), default=0), values)
        with self._tracking():
            self._outbox.log(rows)

    def document(self, kind: str, step: int, data: dict[str, Any]) -> None:
        with self._tracking():
            self._outbox.document(kind, step, data)

    @contextmanager
    def _tracking(self) -> Generator[None]:
        """Log tracking errors as warnings: a broken outbox may lose metrics, never stop the training."""
        try:
            yield
        except (TrackingError, sqlite3.Error) as error:
            logger.warning("tracking: could not record metrics: %s", error, exc_info=error.__cause__)

    # -- results -----------------------------------------------------------------------------------------------

    def reason_to_stop(self) -> str | None:
        """Return "score" or "minutes" once the run has reached a bound of `stop`, else None."""
        stop = self._config.stop
        if stop.score is not None and any(known.accuracy >= stop.score for known in self.evaluations):
            return "score"
        if stop.minutes is not None and self.elapsed_s >= stop.minutes * 60:
            return "minutes"
        return None

    def status(self, *, version: int, finished: str | None, lost_servers: tuple[str, ...]) -> RunStatus:
        steps = self._config.training.steps
        step = self._ledger.versions.last()
        step_s = self._live.get("time/step_s")
        if finished is None:  # a stalled run records nothing, so each status request checks
            self._health.check_stall(step, self.elapsed_s - (self._notes.published_s(step) or 0.0))
        return RunStatus(
            step=step,
            steps=steps,
            version=version,
            reward=self._live.get("reward/mean"),
            accuracy=self.evaluations[-1].accuracy if self.evaluations else None,
            staleness=self._live.get("staleness/token_mean"),
            truncated=self._live.get("completion/truncated"),
            zero_variance=self._live.get("reward/zero_variance"),
            effective_tokens_per_s=self._live.get("throughput/effective_tokens_per_s"),
            generated_tokens_per_s=self._live.get("throughput/generated_tokens_per_s"),
            elapsed_s=self.elapsed_s,
            eta_s=None if step_s is None or step == 0 else self.elapsed_s / step * (steps - step),
            finished=finished,
            emulated=self._config.emulated,
            lost_servers=lost_servers,
            alerts=self._health.alerts,
        )

    def summary(self, *, run_id: str, ending: Ending, spans: Sequence[Span] = ()) -> RunSummary:
        """Build the summary of the ended run.
        Requires scores of the base and the last version, if versions are evaluated. The bottleneck report covers the
        time since this process started its clock, if it published two versions."""
        cpu_s = time.process_time() - self._cpu_s
        explained = explain(
            self._config, spans, self._outbox.history(), start_s=self._started_at, controller_cpu_s=cpu_s
        )
        scores = {known.version: known.accuracy for known in self.evaluations}
        wall_s = self._notes.published_s(ending.version) or self.elapsed_s
        target = self._config.stop.score
        reached = [v for v, accuracy in sorted(scores.items()) if target is not None and accuracy >= target]
        tokens = self._ledger.tokens()
        staleness = self._notes.staleness()
        counted = sum(staleness.values())
        return RunSummary(
            run_id=run_id,
            name=self._config.label,
            mode=self._config.mode,
            seed=self._config.seed,
            reason=ending.reason,
            steps=ending.version,
            accuracy_before=scores[0] if self._config.evaluated else None,
            accuracy_after=scores[ending.version] if self._config.evaluated else None,
            best_accuracy=max(scores.values(), default=None),
            rl_wall_s=wall_s,
            time_to_score_s=(self._notes.published_s(reached[0]) or 0.0) if reached else None,
            tokens=tokens,
            effective_tokens_per_s=self._rate(tokens.consumed, wall_s),
            generated_tokens_per_s=self._rate(tokens.generated, wall_s),
            staleness_mean=sum(int(lag) * n for lag, n in staleness.items()) / counted if counted else 0.0,
            staleness_max=max(map(int, staleness), default=0),
            staleness_tokens=staleness,
            model_url=ending.model_url,
            incarnation=self._ledger.notes.incarnation,
            emulated=self._config.emulated_cluster,
            starts=self._notes.starts,
            truncated=self._outbox.mean("completion/truncated"),
            zero_variance=self._outbox.mean("reward/zero_variance"),
            alerts=tuple(alert.text for alert in self._health.alerts),
            bound=explained.text if explained else None,
            idle=explained.idle if explained else {},
        )

    def record_staleness(self, step: int, counts: dict[str, int]) -> None:
        """Record a step's trained tokens by staleness: a histogram in some steps, and the run's total."""
        if not self._is_pruned(step):  # else a late copy of the message
            self._notes.add_staleness(step, counts)
        if self.records_tables(step):
            self.document("staleness_histogram", step, {"counts": counts})

    def _is_pruned(self, step: int) -> bool:
        return step < self._ledger.payloads.forgotten

    def _rate(self, tokens: int, wall_s: float) -> float:
        """Tokens a second, scaled to the emulated cluster if there is one."""
        return self._config.token_rate * tokens / wall_s if wall_s else 0.0

    def _server_rates(self, now: float, loads: list[ServerLoad]) -> dict[str, float]:
        """Server rates since the last call; empty if a server joined or left in between."""
        last, self._last_load = self._last_load, (now, loads)
        if last is None or len(last[1]) != len(loads) or not loads:
            return {}
        span_s = max(now - last[0], 1e-9)
        pairs = list(zip(last[1], loads, strict=True))
        if any(b.generated_tokens < a.generated_tokens for a, b in pairs):
            return {}
        generated = self._rate(sum(b.generated_tokens - a.generated_tokens for a, b in pairs), span_s)
        return {
            "throughput/generated_tokens_per_s": generated,
            "throughput/generated_tokens_per_s_per_device": generated / self._config.launch.devices,
            "rollout/running_completions": sum(b.completion_s - a.completion_s for a, b in pairs) / span_s / len(loads),
            "bubble/generation_idle": min(1.0, sum(b.idle_s - a.idle_s for a, b in pairs) / span_s / len(loads)),
            "bubble/generation_paused": min(1.0, sum(b.paused_s - a.paused_s for a, b in pairs) / span_s / len(loads)),
            "weights/swap_ms": max(load.swap_ms for load in loads),
            "weights/recompute_ms": max(load.recompute_ms for load in loads),
            "weights/recomputed_tokens": sum(load.recomputed_tokens for load in loads),
        }
