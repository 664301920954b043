import random

from benchmarks import verifiers as benchmark

GOLDS = {"one": ["1,234", "-0.75", r"\frac{3}{4}", "3/4", r"3\sqrt{2}", "(1,2)"], "two": ["9"]}


def changed(change, *arguments):
    return [change(gold, *arguments) for gold in GOLDS["one"]]


def test_the_same_answers_are_written_otherwise():
    assert changed(benchmark.decimal_or_fraction) == ["1234.0", r"-\frac{3}{4}", "0.75", "0.75", None, None]
    assert changed(benchmark.thousands) == ["1,234", None, None, None, None, None]
    assert changed(benchmark.dfrac) == [None, None, r"\dfrac{3}{4}", None, None, None]
    assert changed(benchmark.unit)[4:] == [None, None]
    assert changed(benchmark.spacing)[5] == r"(1 ,\, 2)"


def test_wrong_answers_are_none_that_are_right_after_all():
    rng = random.Random(1)
    assert changed(benchmark.inverted, GOLDS, rng) == [None, None, r"\frac{4}{3}", "4/3", None, None]
    assert changed(benchmark.sign, GOLDS, rng)[:4] == ["-1,234", "0.75", r"-\left(\frac{3}{4}\right)", "-3/4"]
    assert all(one in GOLDS["one"] for one in changed(benchmark.another, GOLDS, rng))
    assert benchmark._changed("7.0", "7.") is None
    assert benchmark._changed("7.0", "8") == "8"
