"""Advice on how to share devices out, from made-up measurements whose best split is known."""

from typing import Any

import pytest

from areal_core.config.schema import load
from areal_core.planning.split import advice, decode_pace, generation_used, rates, splits
from tests.support.splits import COMPLETION_S, FIXED_S, GENERATED, TRAINED, config, curves, measured


@pytest.mark.parametrize(("servers", "ranks"), [(2, 6), (4, 4), (5, 3), (7, 1)])
def test_the_best_split_is_found_from_any_other(servers: int, ranks: int) -> None:
    """Of eight devices: 3 x 5000 against 5 x 4000, 4 x 5000 against 4 x 4000, and so on: four each is the best."""
    found = splits(config(servers, ranks), measured(servers, ranks))
    assert (found[0].servers, found[0].ranks) == (4, 4)
    assert found[0].ratio == pytest.approx(4 * TRAINED / min(servers * GENERATED, ranks * TRAINED))
    assert [split.servers + split.ranks for split in found] == [8] * 7
    assert found[0].overrides == ["generation.servers=4", "training.ranks=4"]


@pytest.mark.parametrize(
    ("completions", "seconds", "fixed_s", "completion_s"),
    [
        pytest.param([10, 40, 80, 95], None, FIXED_S, COMPLETION_S, id="a line"),
        pytest.param([10, 100], [0.02, 0.01], 0.015, 0.0, id="faster with more"),
        pytest.param([10, 100], [0.001, 0.02], 0.0, 0.0105 / 55, id="all of it grows"),
        pytest.param([50, 51], [0.015, 0.016], 0.0155, 0.0, id="loads that are alike"),
    ],
)
def test_the_pace_of_decoding_is_the_line_through_the_measured_loads(
    completions: list[float], seconds: list[float] | None, fixed_s: float, completion_s: float
) -> None:
    """Neither of its parts is negative."""
    seconds = seconds or [FIXED_S + COMPLETION_S * n for n in completions]
    found = decode_pace(completions, seconds, [1.0, 2.0, 1.0, 5.0] if len(completions) > 2 else [1.0, 1.0])
    assert (found.fixed_s, found.completion_s) == (pytest.approx(fixed_s), pytest.approx(completion_s))


def test_the_ends_of_a_run_are_left_out() -> None:
    """For the last eta + 1 steps nothing more is admitted: servers run empty. The first ones wait for the first
    completions."""
    chosen = config(4, 4)
    logged = curves(4, 4, chosen.training.steps)
    steps, eta = chosen.training.steps, chosen.max_staleness
    last = dict.fromkeys((*range(2, eta + 2), *range(steps - eta, steps + 1)), 0.1)
    for key in ("throughput/generated_tokens_per_s", "rollout/running_completions"):
        logged[key] = [(step, value * last.get(step, 1.0)) for step, value in logged[key]]
    found = rates(chosen, logged)
    assert found is not None
    assert found.generated_tokens_per_s == found.effective_tokens_per_s == pytest.approx(4 * TRAINED)
    assert found.trained_share == pytest.approx(1.0)
    seven = rates(config(7, 1), curves(7, 1, 25))
    assert seven is not None
    assert generation_used(config(7, 1), seven) < 0.5  # 7 servers make what one would nearly make


@pytest.mark.parametrize(
    ("fields", "points"),
    [
        ({"mode": "sync"}, {}),
        ({"rollout": {"max_staleness": 0}}, {}),
        ({}, {}),
        (None, None),
        (None, {"throughput/generated_tokens_per_s": [(step, 0.0) for step in range(2, 10)]}),
    ],
)
def test_stages_that_share_devices_and_runs_that_measured_too_little_tell_no_rates(
    fields: dict[str, Any] | None, points: dict[str, Any] | None
) -> None:
    chosen = config(4, 4) if fields is None else load(fields)
    assert rates(chosen, {} if points is None else curves(4, 4, 9) | points) is None


def test_the_advice_is_one_sentence() -> None:
    assert advice(config(6, 2), measured(6, 2)) == (
        "By these rates 4 servers and 4 ranks would be 2.00 times as fast as 6 and 2 (generation.servers=4 "
        "training.ranks=4)."
    )
    assert advice(config(4, 4), measured(4, 4)) == ("These rates suggest no better split of the 8 devices.")
