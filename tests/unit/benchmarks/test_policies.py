from __future__ import annotations

from areal_core.types import RunSummary, TokenLedger
from benchmarks.policies import report


def run(seed: int, speed: float, *, staleness_max: int, dropped: int) -> RunSummary:
    return RunSummary(
        run_id=f"r-{seed}",
        name="cpu-async",
        mode="async",
        seed=seed,
        reason="steps",
        steps=25,
        accuracy_before=None,
        accuracy_after=None,
        best_accuracy=None,
        rl_wall_s=10.0,
        time_to_score_s=None,
        tokens=TokenLedger(generated=1000, consumed=1000 - dropped, dropped=dropped, buffered=0, in_flight=0),
        effective_tokens_per_s=speed,
        generated_tokens_per_s=speed,
        staleness_mean=1.0 + 0.1 * seed,
        staleness_max=staleness_max,
        model_url="final",
        incarnation=0,
    )


def test_each_policy_stands_beside_the_reference_of_its_seed() -> None:
    admit = {1: run(1, 100.0, staleness_max=3, dropped=0), 2: run(2, 300.0, staleness_max=2, dropped=0)}
    drop = {1: run(1, 90.0, staleness_max=2, dropped=10), 2: run(2, 330.0, staleness_max=2, dropped=30)}
    found = report({"admit": admit, "drop": drop})
    assert found["admit"]["over_admit"]["median"] == 1.0
    assert found["admit"]["staleness_max"] == 3
    assert found["drop"]["over_admit"]["median"] == 1.0  # of 0.9 and 1.1
    assert found["drop"]["effective_tokens_per_s"] == {1: 90, 2: 330}
    assert (found["drop"]["staleness_max"], found["drop"]["staleness_mean"]) == (2, 1.15)
    assert found["drop"]["dropped_share"] == 0.02
