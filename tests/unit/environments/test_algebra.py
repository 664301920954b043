import threading

import pytest

from areal_core.environments.algebra import equal
from tests.support.cases import equality_cases


def test_formulas_are_compared_by_value() -> None:
    cases = equality_cases("formulas.txt")
    assert [case for case in cases if {equal(*case[:2]), equal(*case[1::-1])} != {case[2]}] == []


@pytest.mark.parametrize(
    "hostile",
    [
        "9^{9^{9^{9}}}", "1000000!", "3000000!!", "(((99^{99})^{99})^{99})^{99}", r"\binom{100000000}{50000000}",
        "e^{e^{e^{9}}}", r"\sinh(10^{9})", "(" * 200 + "x" + ")" * 200, "x^{" * 99 + "x" + "}" * 99,
        r"\sum_{n=1}^{10000000} \frac{1}{n}", "(99^{9999}/7)^{x}+" * 40 + "1", "9" * 5000, "-" * 599 + "x",
    ],
)  # fmt: skip
def test_hostile_formulas_are_refused(hostile):
    assert not equal(r"x+\sqrt{2}", hostile)
    assert not equal(hostile, hostile + "+1")


def test_threads_do_not_share_a_precision():
    pairs = [(r"\sqrt{2}", rf"\sqrt{{2}}+10^{{-{digits}}}") for digits in (3, 600)] * 40
    found = []
    threads = [threading.Thread(target=lambda pair=pair: found.append(equal(*pair))) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * len(pairs)
