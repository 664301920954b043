"""Whether a run that goes on is well: alerts by the points that it records, raised and taken back.

    train_inference_kl  trainer and servers differ in what the same weights mean
    stale               too much of a batch is older than the bound, as rollout.batch_selection=admit lets it be
    rewards             too many groups can't be scored, and are dropped
    no_result           too many rollouts of a batch can't be scored, and are left out of it
    stall               no version is new for long, although every process works, as where all groups are dropped
    idle                nothing can be learnt: all completions are cut off, all rewards equal, or all tokens masked

What ends processes that hang is `areal_core.launch.heartbeat`; here nothing is ended. An alert is logged, stands in the
status, and it is for the control plane to act on it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from areal_core.config.groups import HealthConfig
from areal_core.types import Alert

logger = logging.getLogger(__name__)

_STEPS = 10  # over which groups without rewards are counted
_UNSCORED = ("rollout/reward_failed_groups", "rollout/reward_timeout_groups", "rollout/reward_worker_died_groups")
_IDLE = {  # a share that is 1 where a step teaches nothing: what it means, and the fields to change
    "completion/truncated": "all completions were cut off: raise task.max_new_tokens",
    "reward/zero_variance": "all rewards that are compared were equal: choose other prompts (task) or another verifier "
    "(environment.verifier)",
    "loss/mask_fraction": "all tokens were masked: widen algorithm.behaviour_mask_low and behaviour_mask_high",
}


class Health:
    """The alerts of one run of so many `steps`. `groups` are those of a batch. A run that is emulated `learns` nothing,
    and raises no alert for that."""

    def __init__(self, config: HealthConfig, *, groups: int, steps: int, learns: bool = True) -> None:
        self._config = config
        self._groups = groups
        self._steps = steps
        self._max_idle_steps = config.max_idle_steps if learns else None
        self._idle = dict.fromkeys(_IDLE, 0)  # steps in a row in which the share was 1
        self._unscored: deque[float] = deque(maxlen=_STEPS + 1)  # since the start, by version
        self._alerts: dict[str, Alert] = {}  # by kind

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """What is wrong now, in the order in which it began."""
        return tuple(self._alerts.values())

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Points of a step; those of all its keys need not come at once."""
        if (kl := values.get("policy/train_inference_kl")) is not None:
            said = f"policy/train_inference_kl is {kl:.3g} nats a token"
            self._judge("train_inference_kl", step, said, kl, "max_train_inference_kl")
        if (stale := values.get("staleness/groups_over_bound")) is not None:
            share = stale / self._groups
            said = f"{share:.0%} of the batch is older than rollout.max_staleness"
            self._judge("stale", step, said, share, "max_stale_share")
        if (failed := values.get("outcome/failed")) is not None:
            said = f"{failed:.0%} of the batch's rollouts have no result"
            self._judge("no_result", step, said, failed, "max_unscored_share")
        if all(key in values for key in _UNSCORED):
            if step == 1:
                self._unscored.append(0.0)
            self._unscored.append(sum(values[key] for key in _UNSCORED))
            failed = self._unscored[-1] - self._unscored[0]
            tried = self._groups * max(1, len(self._unscored) - 1) + failed
            said = f"{failed / tried:.0%} of the groups of late had no rewards"
            self._judge("rewards", step, said, failed / tried, "max_unscored_share")
        if (bound := self._max_idle_steps) is not None:
            self._look_for_idle(step, values, min(bound, self._steps))

    def _look_for_idle(self, step: int, values: Mapping[str, float], bound: int) -> None:
        for key in _IDLE.keys() & values.keys():
            self._idle[key] = self._idle[key] + 1 if values[key] == 1.0 else 0
        why = next((why for key, why in _IDLE.items() if self._idle[key] >= bound), None)
        said = f"nothing was learnt in {bound} steps, {why} (health.max_idle_steps)"
        self._tell("idle", step, said if why else None)

    def wait(self, step: int, seconds: float) -> None:
        """So long there has been no version after that of `step`."""
        self._judge("stall", step, f"no step for {seconds:.0f} s", seconds, "max_step_s")

    def _judge(self, kind: str, step: int, said: str, value: float, field: str) -> None:
        bound: float | None = getattr(self._config, field)
        within = bound is None or value <= bound
        self._tell(kind, step, None if within else f"{said}, more than {bound:g} (health.{field})")

    def _tell(self, kind: str, step: int, text: str | None) -> None:
        """Raise an alert, unless it stands already; without a text, take it back."""
        if text is None:
            if self._alerts.pop(kind, None):
                logger.info("no longer: %s", kind)
        elif kind not in self._alerts:
            self._alerts[kind] = Alert(kind=kind, step=step, text=text)
            logger.warning("%s", text)
