"""How far ahead generation is, in virtual time."""

from benchmarks import depth


def test_half_the_depth_is_half_the_staleness_at_the_same_speed() -> None:
    found = depth.in_virtual_time("7b", [1])
    assert found["4"]["over_4"] == 1
    assert found["2"]["over_4"] > 0.98
    assert found["0.5"]["over_4"] < 0.9
    for arm, of_depth in found.items():
        assert abs(of_depth["staleness_mean"] - float(arm)) < 0.1
        assert of_depth["staleness_max"] <= depth.BOUND + 2  # the batch takes what has ended: a straggler may exceed it
