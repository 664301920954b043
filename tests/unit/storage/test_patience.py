"""What fails for a while is tried again, for so long and no longer, and told once. No time passes but a virtual one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_core.storage.folder import Folder
from areal_core.storage.patience import Patience
from tests.support.virtual import VirtualClock

_LIMIT_S = 1800.0


class Failing:
    """Work that raises these errors, one a try, and then gives its result."""

    def __init__(self, *errors: OSError) -> None:
        self._errors: Iterator[OSError] = iter(errors)
        self.tries = 0

    def __call__(self) -> str:
        self.tries += 1
        for error in self._errors:
            raise error
        return "done"


def full() -> OSError:
    return OSError(28, "No space left on device")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "areal_core")


def test_it_is_tried_at_growing_intervals_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    time, work = VirtualClock(), Failing(*(full() for _ in range(12)))
    patience = Patience(_LIMIT_S, time.clock)
    assert patience.run(work, "write /store/x", Folder()) == "done"
    for number, seconds in enumerate(time.slept):
        longest = min(10.0, 0.25 * 2**number)
        assert longest / 2 <= seconds <= longest
    assert len(time.slept) == 12
    begin, end = told(caplog)
    assert begin == (
        "WARNING storage: can't write /store/x: No space left on device; "
        "trying again for up to 1800 s (storage.patience_s)"
    )
    assert end == f"INFO storage: responds again, after {sum(time.slept):.1f} s"
    caplog.clear()
    assert Patience(8.0, VirtualClock().clock, quiet=True).run(Failing(full()), "write x", Folder()) == "done"
    assert told(caplog) == []


def test_its_patience_ends(caplog: pytest.LogCaptureFixture) -> None:
    time, work = VirtualClock(), Failing(*(full() for _ in range(10_000)))
    patience = Patience(_LIMIT_S, time.clock)
    with pytest.raises(OSError, match="No space"):
        patience.run(work, "write /store/x", Folder())
    assert sum(time.slept) == pytest.approx(_LIMIT_S)
    assert work.tries < _LIMIT_S / 5 + 10
    assert len(told(caplog)) == 1
    lasting = Failing(full(), OSError(30, "Read-only file system"))  # which ends a wait
    with pytest.raises(OSError, match="Read-only"):
        patience.run(lasting, "write /store/x", Folder())
    assert lasting.tries == 2


@pytest.mark.parametrize(
    ("limit_s", "error"),
    [(0.0, OSError(13, "denied")), (_LIMIT_S, OSError(13, "denied")), (0.0, OSError(28, "No space left on device"))],
)
def test_lasting_error_or_one_without_patience_is_raised_at_once(
    caplog: pytest.LogCaptureFixture, limit_s: float, error: OSError
) -> None:
    time, work = VirtualClock(), Failing(error)
    with pytest.raises(type(error), match=error.strerror):
        Patience(limit_s, time.clock).run(work, "write /store/x", Folder())
    assert (work.tries, time.slept, told(caplog)) == (1, [], [])


def test_a_process_that_stood_still_for_longer_tries_once_more() -> None:
    time = VirtualClock()

    def stand_still() -> str:
        if time.clock.now() < 2 * _LIMIT_S:
            time.clock.sleep(2 * _LIMIT_S)
            raise TimeoutError(110, "Connection timed out")
        return "done"

    assert Patience(_LIMIT_S, time.clock).run(stand_still, "write x", Folder()) == "done"


def test_threads_that_wait_side_by_side_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    threads = 4
    together = threading.Barrier(threads)  # in the first sleep, when all have failed

    def meanwhile() -> None:
        together.wait(timeout=60)

    time = VirtualClock(meanwhile)
    patience = Patience(_LIMIT_S, time.clock)
    work: list[Callable[[], str]] = [Failing(full()) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(lambda work: patience.run(work, "write x", Folder()), work))
    assert done == ["done"] * threads
    assert [line.split()[0] for line in told(caplog)] == ["WARNING", "INFO"]
