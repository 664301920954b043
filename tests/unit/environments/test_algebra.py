import psutil
import pytest

from areal_core.environments.algebra import Algebra
from areal_core.errors import RewardError
from areal_core.types import Outcome


@pytest.fixture(scope="module")
def algebra():
    opened = Algebra(cpu_limit_s=0.5)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        (r"2\sqrt{2}", r"\sqrt{8}", Outcome.RIGHT),
        ("(x+1)^2", "x^2+2x+1", Outcome.RIGHT),
        (r"\frac{d x}{d t}=k x-a", r"\frac{dx}{dt} = -a + kx", Outcome.RIGHT),
        (r"\frac{d x}{d t}=k x-a", r"\frac{d t}{d x}=k x-a", Outcome.WRONG),
        (r"3\sqrt{2}", "2", Outcome.WRONG),
        (r"\frac{1}{s+a}", r"\frac{1}{s-a}", Outcome.WRONG),
        ("x", r"\frac{", Outcome.UNPARSABLE),
        (r"np.arcsin(10/13", "x", Outcome.FAILED),
    ],
)
def test_compare(algebra, gold, answer, outcome):
    assert algebra.compare(gold, answer) is outcome


@pytest.mark.parametrize(
    "hostile",
    ["9^{9^{9^{9}}}", "1000000!", "(((99^{99})^{99})^{99})^{99}", r"\sum_{n=1}^{10000000} \frac{1}{n^n}"],
)
def test_what_would_take_for_ever_ends_by_its_own_cpu_time(algebra, hostile):
    """Neither a signal handler nor a thread could end a multiplication of that size."""
    before = cpu_s(algebra)
    assert algebra.compare(r"\sqrt{2}", hostile) is Outcome.TIMED_OUT
    assert algebra.compare("x+y", "y+x") is Outcome.RIGHT  # by the next child
    assert cpu_s(algebra) - before < 2


def cpu_s(algebra: Algebra) -> float:
    """Of the process and the children that it has waited for."""
    times = psutil.Process(algebra.process.pid).cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def test_a_child_that_dies_at_rest_costs_nothing(algebra):
    assert algebra.compare("x", "x") is Outcome.RIGHT  # there is a child now
    [child] = psutil.Process(algebra.process.pid).children()
    child.kill()
    child.wait()
    assert [algebra.compare("x", "x+0"), algebra.compare("x", "y")] == [Outcome.RIGHT, Outcome.WRONG]


def test_it_ends_when_its_other_side_is_closed_and_is_an_error_once_it_is_gone():
    algebra = Algebra()
    assert algebra.compare("x", "x+0") is Outcome.RIGHT
    processes = [psutil.Process(algebra.process.pid), *psutil.Process(algebra.process.pid).children()]
    assert len(processes) == 2
    for process in processes:
        process.kill()
    with pytest.raises(RewardError, match="the process that compares formulas is gone"):
        algebra.compare("x", "y")
    other = Algebra()
    assert other.compare("x", "2x/2") is Outcome.RIGHT
    [child] = psutil.Process(other.process.pid).children()
    other.close()
    assert other.process.returncode == 0
    assert not child.is_running()
