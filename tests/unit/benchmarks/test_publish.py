"""What publishing costs, by the short form of its benchmark: speeds are not looked at."""

from benchmarks import publish


def test_every_figure_is_measured_and_every_damaged_version_refused() -> None:
    found = publish.measure(publish.SMALL, rounds=1, step_s=0.01, damaged=16)
    assert (found["one_fetch"], found["damaged_refused"]) == (1, 1.0)
    assert found["served_meanwhile"] > 0
    figures = (found["publish_over_cp"], found["blocked_over_copy"], found["http_gb_per_cpu_s"])
    assert min(*figures, found["swap_ms"]["median"]) > 0
