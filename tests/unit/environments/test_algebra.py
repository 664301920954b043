import pytest

from areal_core.environments.fork_server import ForkServer, Reply
from areal_core.types import Outcome


@pytest.fixture(scope="module")
def algebra():
    opened = ForkServer("areal_core.environments.algebra:Formulas", cpu_s=0.5)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        (r"2\sqrt{2}", r"\sqrt{8}", Outcome.RIGHT),
        ("(x+1)^2", "x^2+2x+1", Outcome.RIGHT),
        (r"0<x\leq 1", "(0,1]", Outcome.RIGHT),  # SymPy imports more for it, in the fork
        (r"\frac{d x}{d t}=k x-a", r"\frac{dx}{dt} = -a + kx", Outcome.RIGHT),
        (r"\frac{d x}{d t}=k x-a", r"\frac{d t}{d x}=k x-a", Outcome.WRONG),
        (r"3\sqrt{2}", "2", Outcome.WRONG),
        (r"\frac{1}{s+a}", r"\frac{1}{s-a}", Outcome.WRONG),
        (r"\sin(2x)+y", r"2\sin(x)\cos(x)+y", Outcome.RIGHT),
        (r"\sqrt{x^2}+10^{-9}", r"|x|", Outcome.WRONG),  # too close to tell by numbers
        (r"\ln(x-3)-\ln(y-3)", r"\ln(x-3)-\ln(y-2)", Outcome.WRONG),
        (r"f(x)+1", r"f(x)+2", Outcome.WRONG),
        (r"\begin{pmatrix} x & 2 \end{pmatrix}", r"\begin{pmatrix} x & 1+1 \end{pmatrix}", Outcome.RIGHT),
        ("x", r"\frac{", Outcome.UNPARSABLE),
        (r"np.arcsin(10/13", "x", Outcome.FAILED),
    ],
)
def test_compare(algebra, gold, answer, outcome):
    assert algebra.ask(gold, answer) == Reply("done", outcome)


@pytest.mark.parametrize(
    "hostile",
    ["9^{9^{9^{9}}}", "3000000!!", "(((99^{99})^{99})^{99})^{99}", r"\binom{100000000}{50000000}"],
)
def test_endless_comparison_ends_by_its_own_cpu_time(algebra, hostile):
    """Neither a signal handler nor a thread could end a multiplication of that size."""
    assert algebra.ask(r"\sqrt{2}", hostile) == Reply("timed_out")
    assert algebra.ask("x+y", "y+x") == Reply("done", Outcome.RIGHT)
