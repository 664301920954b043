"""Alerts of a run that goes on: raised once, and taken back."""

from __future__ import annotations

import logging

import pytest

from areal_core.config.groups import HealthConfig
from areal_core.controller.health import Health

GROUPS = 8
FAILED, LATE, DIED = (f"rollout/reward_{kind}_groups" for kind in ("failed", "timeout", "worker_died"))


@pytest.fixture
def health() -> Health:
    return Health(HealthConfig(), groups=GROUPS, steps=100)


def kinds(health: Health) -> list[str]:
    return [alert.kind for alert in health.alerts]


def test_train_inference_kl_is_told_once_and_taken_back(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    health.check(1, {"policy/train_inference_kl": 0.1})
    assert health.alerts == ()
    for step in (2, 3):
        health.check(step, {"policy/train_inference_kl": 0.25, "reward/mean": 1.0})
    (alert,) = health.alerts
    said = "policy/train_inference_kl is 0.25 nats per token, more than 0.1 (health.max_train_inference_kl)"
    assert (alert.kind, alert.step, alert.text) == ("train_inference_kl", 2, said)
    health.check(4, {"reward/mean": 1.0})  # it is not measured at every step
    assert kinds(health) == ["train_inference_kl"]
    health.check(5, {"policy/train_inference_kl": 0.0})
    assert health.alerts == ()
    assert caplog.messages == [said, "alert withdrawn: train_inference_kl"]


def test_groups_without_rewards_count_over_ten_steps(health: Health) -> None:
    restarted = Health(HealthConfig(), groups=GROUPS, steps=100)
    for step in (7, 8):  # what failed before a restart is not of late
        restarted.check(step, {FAILED: 100, LATE: 0, DIED: 0})
    assert restarted.alerts == ()
    failed = 0
    for step in range(1, 11):  # one in ten steps is nothing
        failed += step == 5
        health.check(step, {FAILED: failed, LATE: 0, DIED: 0})
    assert health.alerts == ()
    for step in range(11, 15):  # half as many as are trained on
        failed += GROUPS // 2
        health.check(step, {FAILED: failed - step, LATE: step, DIED: 0})
    assert kinds(health) == ["rewards"]
    for step in range(15, 26):
        health.check(step, {FAILED: failed, LATE: 0, DIED: 0})
    assert health.alerts == ()


def test_share_or_time_above_its_bound_raises_an_alert(health: Health) -> None:
    health.check(1, {"staleness/groups_over_bound": GROUPS / 2, "outcome/failed": 0.1})
    health.check_stall(1, 1800.0)
    assert health.alerts == ()
    health.check(2, {"staleness/groups_over_bound": GROUPS / 2 + 1, "outcome/failed": 0.25})
    health.check_stall(2, 1801.0)
    assert [alert.text for alert in health.alerts] == [
        "62% of the batch is older than rollout.max_staleness, more than 0.5 (health.max_stale_share)",
        "25% of the rollouts in the batch have no result, more than 0.1 (health.max_unscored_share)",
        "no step for 1801 s, more than 1800 (health.max_step_s)",
    ]
    health.check_stall(3, 1.0)
    assert kinds(health) == ["stale", "no_result"]


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("completion/truncated", "task.max_new_tokens"),
        ("reward/zero_variance", "environment.verifier"),
        ("loss/mask_fraction", "algorithm.behaviour_mask_low"),
    ],
)
def test_run_that_learns_nothing_names_the_field_to_change(health: Health, key: str, field: str) -> None:
    for step in range(1, 10):
        health.check(step, {key: 0.99 if step == 4 else 1.0, "time/step_s": 1.0})
        health.check(step, {"loss/policy": 0.0})
        assert kinds(health) == (["idle"] if step == 9 else [])
    (alert,) = health.alerts
    assert alert.text.startswith("no learning signal in 5 steps, all ")
    assert field in alert.text
    health.check(10, {key: 0.5})
    assert kinds(health) == []
