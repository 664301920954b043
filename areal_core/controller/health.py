"""Alerts about the health of a run, raised and withdrawn from the metrics that it records.

    train_inference_kl  trainer and servers disagree on the same model weights
    stale               too much of a batch exceeds the staleness bound, as rollout.batch_selection=admit permits
    rewards             too many groups can't be scored and are dropped
    no_result           too many rollouts of a batch have no result and leave the loss
    stall               no new version for long, although every process works; for instance all groups are dropped
    idle                nothing can be learnt: all completions truncated, all rewards equal, or all tokens masked

This module ends no process; `areal_core.launch.heartbeat` ends those that hang. An alert is logged and shown in the
status, and the control plane acts on it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from areal_core.config.groups import HealthConfig
from areal_core.types import Alert

logger = logging.getLogger(__name__)

_STEPS = 10  # number of steps over which unscored groups are counted
_UNSCORED = ("rollout/reward_failed_groups", "rollout/reward_timeout_groups", "rollout/reward_worker_died_groups")
_IDLE = {  # metrics that are 1 if a step teaches nothing: the cause, and the fields to change
    "completion/truncated": "all completions were truncated: raise task.max_new_tokens",
    "reward/zero_variance": "all groups were zero-variance: choose other prompts (task) or another verifier "
    "(environment.verifier)",
    "loss/mask_fraction": "all tokens were masked: widen algorithm.behaviour_mask_low and behaviour_mask_high",
}


class Health:
    """The alerts of one run with `steps` steps and `groups` groups a batch.
    An emulated run does not learn (`learns` is False), and raises no idle alert."""

    def __init__(self, config: HealthConfig, *, groups: int, steps: int, learns: bool = True) -> None:
        self._config = config
        self._groups = groups
        self._steps = steps
        self._max_idle_steps = config.max_idle_steps if learns else None
        self._idle = dict.fromkeys(_IDLE, 0)  # steps in a row with the value 1
        self._unscored: deque[float] = deque(maxlen=_STEPS + 1)  # since the start, by version
        self._alerts: dict[str, Alert] = {}  # by kind

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The current alerts, in the order in which they began."""
        return tuple(self._alerts.values())

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Judge metrics of a step. The keys of one check must come in one call; others may come later."""
        if (kl := values.get("policy/train_inference_kl")) is not None:
            text = f"policy/train_inference_kl is {kl:.3g} nats per token"
            self._judge("train_inference_kl", step, text, kl, "max_train_inference_kl")
        if (stale := values.get("staleness/groups_over_bound")) is not None:
            share = stale / self._groups
            text = f"{share:.0%} of the batch is older than rollout.max_staleness"
            self._judge("stale", step, text, share, "max_stale_share")
        if (failed := values.get("outcome/failed")) is not None:
            text = f"{failed:.0%} of the rollouts in the batch have no result"
            self._judge("no_result", step, text, failed, "max_unscored_share")
        if all(key in values for key in _UNSCORED):
            if step == 1:
                self._unscored.append(0.0)
            self._unscored.append(sum(values[key] for key in _UNSCORED))
            failed = self._unscored[-1] - self._unscored[0]
            tried = self._groups * max(1, len(self._unscored) - 1) + failed
            text = f"{failed / tried:.0%} of the recent groups have no rewards"
            self._judge("rewards", step, text, failed / tried, "max_unscored_share")
        if (bound := self._max_idle_steps) is not None:
            self._check_idle(step, values, min(bound, self._steps))

    def _check_idle(self, step: int, values: Mapping[str, float], bound: int) -> None:
        for key in _IDLE.keys() & values.keys():
            self._idle[key] = self._idle[key] + 1 if values[key] == 1.0 else 0
        why = next((why for key, why in _IDLE.items() if self._idle[key] >= bound), None)
        text = f"no learning signal in {bound} steps, {why} (health.max_idle_steps)"
        self._set_alert("idle", step, text if why else None)

    def check_stall(self, step: int, seconds: float) -> None:
        """Judge the time in seconds since the version of `step` was published."""
        self._judge("stall", step, f"no step for {seconds:.0f} s", seconds, "max_step_s")

    def _judge(self, kind: str, step: int, text: str, value: float, field: str) -> None:
        bound: float | None = getattr(self._config, field)
        within = bound is None or value <= bound
        self._set_alert(kind, step, None if within else f"{text}, more than {bound:g} (health.{field})")

    def _set_alert(self, kind: str, step: int, text: str | None) -> None:
        """Raise an alert unless it is raised already. None as `text` withdraws it."""
        if text is None:
            if self._alerts.pop(kind, None):
                logger.info("alert withdrawn: %s", kind)
        elif kind not in self._alerts:
            self._alerts[kind] = Alert(kind=kind, step=step, text=text)
            logger.warning("%s", text)
