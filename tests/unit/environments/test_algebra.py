import threading

import pytest

from areal_core.environments.algebra import equal, factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("0", r"\sqrt{3+2\sqrt{2}}-1-\sqrt2"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\sin(2x)+y", r"2\sin(x)\cos(x)+y"),
        (r"\tan^{-1} x", r"\arctan x"),
        (r"\log_{10} 2", r"\lg 2"),
        (r"\sqrt{ab}", r"\sqrt a\sqrt b"),
        (r"\sqrt{x^2}", "|x|"),
        (r"\sqrt[3]{-8}", "-2"),
        ("x^{1/3}", r"\sqrt[3]{x}"),
        (r"e^{i\pi/3}", r"\frac{1}{2}+\frac{\sqrt3}{2}i"),
        ("(n+1)!", "(n+1) n!"),
        ("(-1)^{n+2}", "(-1)^n"),
        (r"\frac{\sqrt3}{2}", r"\cos 30^\circ"),
        ("e^{8419p}", "e^{8418p}e^p"),  # too large to be evaluated at most points
    ],
)
def test_equal_formulas(one, other):
    assert equal(one, other)
    assert equal(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("MV", "mv"),
        ("3", "3 4"),
        ("|x|", "x"),
        (r"\ln|x|", r"\ln x"),
        (r"\lfloor x \rfloor", "x"),
        (r"\frac{d x}{d t}", r"\frac{d t}{d x}"),
        (r"\ln(x-3)-\ln(y-3)", r"\ln(x-3)-\ln(y-2)"),
        ("I(0)", "0"),
        ("0", r"\infty-\infty"),
        ("-1", "(-1)^{n+1}"),
        ("3", "3!!"),
        ("0", r"\frac{0}{0}"),
        ("x", r"\frac{"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        ("2^{-60}", "2^{-61}"),
        ("e^{-50}", "e^{-60}"),
        ("2^{2005}", "2^{2005}+1"),
        (r"\sqrt{10^{80}+1}", "10^{40}"),
        (r"\sqrt{10^{60}+1}", "10^{30}"),
        (r"\sqrt{2}+e^{-1000}", r"\sqrt{2}"),
        (r"\sqrt{x^2}+10^{-9}", "|x|"),
    ],
)
def test_different_formulas(one, other):
    assert not equal(one, other)
    assert not equal(other, one)


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


@pytest.mark.parametrize(
    ("one", "other", "sign"),
    [
        (("2x+3y", "6"), ("4x+6y", "12"), 1),
        (("x", "y"), ("y", "x"), -1),
        (("x^2+y^2", "4"), ("x^2+y^2", "2"), 0),
        (("x", "y"), ("0", "0"), 0),
        (("y", "2x+1"), (r"\sin 30^\circ", r"\frac12"), 0),
        (("x", "y"), ("x^2", "y^2"), 0),
    ],
)
def test_equations_are_equal_up_to_a_factor(one, other, sign):
    assert factor(one, other) == sign


def test_threads_do_not_share_a_precision():
    pairs = [(r"\sqrt{2}", rf"\sqrt{{2}}+10^{{-{digits}}}") for digits in (3, 600)] * 40
    found = []
    threads = [threading.Thread(target=lambda pair=pair: found.append(equal(*pair))) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * len(pairs)
